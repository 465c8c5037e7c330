"""Reading conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from perilune.errors import UserError
from perilune.model.chat_messages import AssistantMessage, SystemMessage, ToolCall, ToolDeclaration, ToolMessage, UserMessage
from perilune.model.tokenizer import ByteTokenizer
from perilune.train.chat_data import (
    Conversation,
    parse_conversation,
    read_conversations,
    split_conversations,
    tokenize_conversations,
)
from perilune.train.packing import TokenDocuments
from tests.train.tiny_runs import comparable_metrics, recipe_tables, start


def parse(**record: Any) -> Conversation:
    return parse_conversation(json.dumps(record).encode(), "chat.jsonl:3")


def user(content: Any = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def call(name: str = "read", arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def test_a_full_conversation_is_read() -> None:
    found = parse(
        messages=[
            {"role": "developer", "content": "be brief"},
            user([{"type": "text", "text": "what is "}, {"type": "text", "text": "in a?"}]),
            assistant(None, reasoning_content="look", tool_calls=[call(arguments='{"path": "a", "n": 1}', id="1")]),
            {"role": "tool", "content": "42", "tool_call_id": "1", "name": "read"},
            assistant("42", thinking="easy"),
        ],
        tools=[READ],
        effort="low",
        id="ignored at this level",
    )
    assert found.messages == (
        SystemMessage("be brief"),
        UserMessage("what is in a?"),
        AssistantMessage("", "look", (ToolCall("read", {"path": "a", "n": 1}),)),
        ToolMessage("read", "42", 1),
        AssistantMessage("42", "easy"),
    )
    assert found.tools == (ToolDeclaration("read", "", {"type": "object"}),)
    assert (found.effort, found.place) == ("low", "chat.jsonl:3")


def test_arguments_may_be_an_object_and_keep_their_order() -> None:
    found = parse(messages=[user(), assistant(None, tool_calls=[call(arguments={"z": 1, "a": None})])])
    said = found.messages[1]
    assert isinstance(said, AssistantMessage)
    members = said.tool_calls[0].members()
    assert members is not None and [(key, value) for key, (value, _) in members.items()] == [("z", 1), ("a", None)]


def test_answers_find_their_call_by_id_and_else_by_order_and_stand_in_call_order() -> None:
    calls = [call("first", id="a"), call("second", id="b")]
    by_id = parse(
        messages=[
            user(),
            assistant(None, tool_calls=calls),
            {"role": "tool", "content": "2", "tool_call_id": "b"},
            {"role": "tool", "content": "1"},
        ]
    )
    assert by_id.messages[2:] == (ToolMessage("first", "1", 1), ToolMessage("second", "2", 2))
    without = [call("first"), call("second")]
    by_order = parse(
        messages=[
            user(),
            assistant("", tool_calls=without),
            {"role": "tool", "content": "1", "tool_call_id": "x"},
            {"role": "tool", "content": "2"},
        ]
    )
    assert by_order.messages[2:] == (ToolMessage("first", "1", 1), ToolMessage("second", "2", 2))


def test_weight_zero_keeps_a_message_out_of_the_loss() -> None:
    found = parse(messages=[user(), assistant("bad", weight=0), user(), assistant("good", weight=1, refusal=None, annotations=[])])
    assert [message.learn for message in found.messages if isinstance(message, AssistantMessage)] == [False, True]


BAD = {
    "not JSON": (b"{", "not valid JSON"),
    "not UTF-8": (b'{"messages": "\xff"}', "not valid JSON"),
    "NaN": (b'{"messages": NaN}', "NaN is not JSON"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "no object": (b"3", "the line must be an object"),
    "no messages": (b"{}", "`messages` must be a non-empty list, got null"),
    "empty messages": (b'{"messages": []}', "`messages` must be a non-empty list"),
}


@pytest.mark.parametrize(("line", "reason"), BAD.values(), ids=BAD.keys())
def test_a_line_that_is_no_conversation_is_refused_with_its_place(line: bytes, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_conversation(line, "chat.jsonl:3")
    assert str(caught.value).startswith("chat.jsonl:3: ") and reason in str(caught.value)


BAD_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "effort": ({"messages": [user(), assistant()], "effort": "medium"}, "`effort` must be one of low, high, max"),
    "tools no list": ({"messages": [user(), assistant()], "tools": {}}, "`tools` must be a list"),
    "tool without name": ({"messages": [user(), assistant()], "tools": [{"function": {}}]}, "tools[0] must be a declaration"),
    "message no object": ({"messages": ["hi"]}, "messages[0] must be an object"),
    "role": ({"messages": [{"role": "human", "content": "x"}]}, "messages[0].role must be one of"),
    "unhashable role": ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role must be one of"),
    "content missing": ({"messages": [{"role": "user"}, assistant()]}, "messages[0].content must be text, got null"),
    "content part": (
        {"messages": [user([{"type": "image_url"}]), assistant()]},
        "messages[0].content must be text, or a list of text parts",
    ),
    "surrogate": ({"messages": [user("\ud800"), assistant()]}, "messages[0].content must be valid Unicode"),
    "unknown key": ({"messages": [user(), assistant(audio={"id": 1})]}, "messages[1] (assistant) has 'audio'"),
    "calls by user": ({"messages": [{**user(), "tool_calls": [call()]}]}, "messages[0] (user) has 'tool_calls'"),
    "two reasonings": ({"messages": [user(), assistant(thinking="a", reasoning_content="b")]}, "both"),
    "reasoning no text": ({"messages": [user(), assistant(thinking=3)]}, "messages[1].thinking must be text"),
    "empty assistant": ({"messages": [user(), assistant(None)]}, "without content"),
    "no assistant": ({"messages": [user()]}, "no assistant message to learn from"),
    "only weight 0": ({"messages": [user(), assistant(weight=0)]}, "no assistant message to learn from"),
    "weight": ({"messages": [user(), assistant(weight=0.5)]}, "messages[1].weight must be 0 or 1"),
    "calls no list": ({"messages": [user(), assistant(tool_calls={})]}, "messages[1].tool_calls must be a list"),
    "call no object": ({"messages": [user(), assistant(tool_calls=["read"])]}, "tool_calls[0] must be an object with `function`"),
    "call no name": ({"messages": [user(), assistant(tool_calls=[call("")])]}, "function.name must be the name of a tool"),
    "undeclared tool": (
        {"messages": [user(), assistant(tool_calls=[call("rm")])], "tools": [READ]},
        'one of the declared tools (read), got "rm"',
    ),
    "double id": ({"messages": [user(), assistant(tool_calls=[call(id="1"), call(id="1")])]}, "tool_calls[1].id"),
    "broken arguments": ({"messages": [user(), assistant(tool_calls=[call(arguments="{")])]}, "function.arguments is not valid JSON"),
    "arguments no object": ({"messages": [user(), assistant(tool_calls=[call(arguments="[1]")])]}, "function.arguments must be an object"),
    "stray answer": ({"messages": [user(), {"role": "tool", "content": "x"}, assistant()]}, "messages[1] (tool) answers no open call"),
    "answer after user": (
        {"messages": [user(), assistant(tool_calls=[call()]), user(), {"role": "tool", "content": "x"}]},
        "messages[3] (tool) answers no open call",
    ),
    "wrong id": (
        {"messages": [user(), assistant(tool_calls=[call(id="1")]), {"role": "tool", "content": "x", "tool_call_id": "2"}]},
        "answers call '2', which is not open",
    ),
    "answered twice": (
        {"messages": [user(), assistant(tool_calls=[call(id="1")]), *[{"role": "tool", "content": "x", "tool_call_id": "1"}] * 2]},
        "answers call '1', which is not open",
    ),
    "wrong name": (
        {"messages": [user(), assistant(tool_calls=[call()]), {"role": "tool", "content": "x", "name": "write"}]},
        "messages[2].name must be 'read'",
    ),
}


@pytest.mark.parametrize(("record", "reason"), BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_each_fault_of_a_conversation_is_named(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(**record)
    assert str(caught.value).startswith("chat.jsonl:3: ") and reason in str(caught.value)


def test_a_file_is_read_whole_and_its_first_bad_line_named(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    good = json.dumps({"messages": [user(), assistant()]})
    path.write_text(f"{good}\n\n{good}\n")
    assert [conversation.place for conversation in read_conversations(path)] == [f"{path}:1", f"{path}:3"]
    path.write_text(f"{good}\n{{}}\n")
    with pytest.raises(UserError, match=r"chat\.jsonl:2: "):
        read_conversations(path)


def test_a_missing_or_empty_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot read"):
        read_conversations(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="no conversation"):
        read_conversations(tmp_path / "empty.jsonl")


def targets_of(conversation: Conversation) -> str:
    """What a model is trained to say in it, special tokens by their names."""
    tokenizer = ByteTokenizer()
    documents = tokenize_conversations([conversation], tokenizer)
    assert documents.target_mask is not None
    return tokenizer.decode(documents.tokens[documents.target_mask].tolist())


def closed(*names: str) -> str:
    return "".join(f"<|close|>{name}<|sep|>" for name in names)


def opened(name: str) -> str:
    return f"<|open|>{name}<|sep|>"


END = "<|end_of_msg|>"


def test_targets_are_what_the_assistant_says_and_nothing_else() -> None:
    conversation = parse(
        messages=[
            {"role": "system", "content": "be brief"},
            user("what is in a?"),
            assistant("wait", thinking="look", tool_calls=[call(arguments={"path": "a"})]),
            {"role": "tool", "content": "42"},
            assistant("it is 42"),
        ],
        tools=[READ],
        effort="low",
    )
    the_call = opened('call tool="read" index="1"') + opened('argument key="path" type="string"') + "a" + closed("argument", "call")
    said = "look" + closed("think") + opened("response") + "wait" + closed("response")
    first = said + opened("tools") + the_call + closed("tools", "message")
    second = closed("think") + opened("response") + "it is 42" + closed("response", "message")
    assert targets_of(conversation) == first + END + second + END
    tokenizer = ByteTokenizer()
    assert tokenize_conversations([conversation], tokenizer).tokens[-1] == tokenizer.end_of_message_id  # no prompt for a next turn


def test_weight_zero_removes_the_targets_of_that_message_alone() -> None:
    both = parse(messages=[user(), assistant("bad"), user(), assistant("good")])
    one = parse(messages=[user(), assistant("bad", weight=0), user(), assistant("good")])
    said = {text: closed("think") + opened("response") + text + closed("response", "message") + END for text in ("bad", "good")}
    assert targets_of(both) == said["bad"] + said["good"]
    assert targets_of(one) == said["good"]
    tokenizer = ByteTokenizer()
    assert tokenize_conversations([one], tokenizer).tokens.tolist() == tokenize_conversations([both], tokenizer).tokens.tolist()


def test_text_that_spells_a_special_token_stays_text() -> None:
    tokenizer = ByteTokenizer()
    documents = tokenize_conversations([parse(messages=[user(END), assistant(END)])], tokenizer)
    assert documents.tokens.tolist().count(tokenizer.end_of_message_id) == 2


def test_conversations_become_documents_one_after_the_other() -> None:
    conversations = [parse(messages=[user("ab"), assistant("c")]), parse(messages=[user("d"), assistant("ef")])]
    tokenizer = ByteTokenizer()
    found = tokenize_conversations(conversations, tokenizer)
    alone = [tokenize_conversations([conversation], tokenizer) for conversation in conversations]
    assert found.tokens.tolist() == [token for one in alone for token in one.tokens.tolist()]
    assert found.offsets.tolist() == [0, alone[0].num_tokens, found.num_tokens]
    assert found.target_mask is not None
    assert found.target_mask.tolist() == [flag for one in alone if one.target_mask is not None for flag in one.target_mask.tolist()]
    with pytest.raises(ValueError, match="target mask"):
        TokenDocuments.from_sequences([([1, 2], [True])])


def test_the_split_depends_on_each_line_alone() -> None:
    conversations = [parse(messages=[user(f"question {number}"), assistant()]) for number in range(300)]
    train, held_out = split_conversations(conversations, 0.2)
    assert len(train) + len(held_out) == 300 and len(held_out) == pytest.approx(60, abs=25)
    again, _ = split_conversations([*conversations[::-1], parse(messages=[user("one more"), assistant()])], 0.2)
    assert {c.text_hash for c in train} <= {c.text_hash for c in again}


def test_a_file_of_conversations_fine_tunes_the_model_of_an_earlier_run(tmp_path: Path) -> None:
    pretraining = recipe_tables(tmp_path, steps=2)
    start(pretraining, tmp_path / "pretrained")
    path = tmp_path / "chat.jsonl"
    lines = [json.dumps({"messages": [user(f"{number} + 1?"), assistant(str(number + 1))]}) for number in range(12)]
    path.write_text("\n".join([*lines, json.dumps({"messages": [user("long " * 60), assistant()]})]))
    run = {**pretraining["run"], "steps": 4, "tokens_per_batch": 320, "max_length": 160, "eval_tokens": 160}
    tables = {
        "model": {"init_from": str(tmp_path / "pretrained" / "model")},
        "chat": {"path": str(path), "held_out_fraction": 0.2},
        "optimizer": {"learning_rate": 2e-2},
        "run": run,
    }
    result, printed = start(tables, tmp_path / "tuned")
    first, *_, last = [line["loss"] for line in comparable_metrics(tmp_path / "tuned")[1:]]
    assert last < first - 0.5
    assert result.bits_per_byte < result.untrained_bits_per_byte
    assert "left out: 1 longer than 160 tokens, 0 with nothing to learn" in printed
    start(tables, tmp_path / "tuned", resume=True)
