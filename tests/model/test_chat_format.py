import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import UserError
from perilune.model.chat import render
from perilune.model.chat_format import ChatFormat, chat_format
from perilune.model.chat_k2 import render_k2
from perilune.model.chat_messages import (
    AssistantMessage,
    Message,
    OptionMessage,
    SystemMessage,
    ToolCall,
    ToolDeclarationMessage,
    ToolMessage,
    UserMessage,
)
from perilune.model.chat_parser import parse_conversation
from perilune.model.special_tokens import SpecialTokenFamily
from perilune.model.tokenizer import KIMI_K2, KIMI_K3, BpeTokenizer, ByteTokenizer, Segment, TiktokenTokenizer, Tokenizer
from tests.model.conversations import GOLDEN, HOSTILE, WEATHER, call, conversations, text, tool

RANKS = {bytes([byte]): byte for byte in range(256)}
BYTES = ByteTokenizer()
K3 = TiktokenTokenizer(RANKS, KIMI_K3)
K2 = TiktokenTokenizer(RANKS, KIMI_K2)
BPE = BpeTokenizer.train([GOLDEN.replace("<|", " ").replace("|>", " ")] * 3, 420)
each = pytest.mark.parametrize("tokenizer", [BPE, K3, K2], ids=["k3-bpe", "k3", "k2"])
replies = st.builds(AssistantMessage, text, text, st.lists(call, max_size=3).map(tuple))


def expected_prompt(tokenizer: Tokenizer, messages: list[Message], thinking: bool = True) -> list[int]:
    return tokenizer.encode(render_k2(messages) if tokenizer is K2 else render(messages, thinking=thinking))


def sayable(tokenizer: Tokenizer, messages: list[Message]) -> list[Message]:
    return [one for one in messages if tokenizer is not K2 or not isinstance(one, ToolDeclarationMessage | OptionMessage)]


def turn_ids(tokenizer: Tokenizer, messages: list[Message], reply: AssistantMessage, thinking: bool = True) -> list[int]:
    """What a model samples to say `reply` after `messages`, in canonical form."""
    segments = (
        render_k2([*messages, reply], add_generation_prefix=False)
        if tokenizer is K2
        else render([*messages, reply], thinking=thinking, add_generation_prefix=False)
    )
    prompt, whole = expected_prompt(tokenizer, messages, thinking), tokenizer.encode(segments)
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def ids_of(markup: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode([Segment(markup, allow_special=True)])


@each
def test_a_vocabulary_gets_the_format_of_its_family(tokenizer: Tokenizer) -> None:
    form = chat_format(tokenizer)
    assert form.supports_thinking == (tokenizer is not K2)
    assert form.end_ids == (tokenizer.end_of_message_id, tokenizer.eos_id)
    messages: list[Message] = [SystemMessage("Be brief."), UserMessage("Hi")]
    assert form.prompt_ids(messages) == expected_prompt(tokenizer, messages)


def test_a_vocabulary_of_neither_family_is_refused() -> None:
    other = SpecialTokenFamily("other", {"[BOS]": 0, "[EOS]": 1, "<|end|>": 2, "[PAD]": 255}, "<|end|>")
    with pytest.raises(UserError, match="neither chat format"):
        chat_format(TiktokenTokenizer(RANKS, other))


def test_options_reach_the_k3_prompt() -> None:
    form, messages = chat_format(K3), [UserMessage("Hi")]
    ids = form.prompt_ids(messages, [WEATHER], effort="low", tool_choice="required", response_format="json_object")
    assert ids == K3.encode(render(messages, [WEATHER], "low", "required", "json_object"))
    continued = form.continuation_ids(messages, tool_choice="none", response_format={"type": "object"})
    assert K3.decode(ids).endswith("<|open|>think<|sep|>")
    assert "tool_choice=none" in K3.decode(continued)
    assert "json_schema" in K3.decode(continued)
    assert K3.decode(form.prompt_ids(messages, thinking=False)).endswith("<|open|>response<|sep|>")
    assert K3.decode(form.continuation_ids(messages, thinking=False)).endswith("<|open|>response<|sep|>")


def test_k2_leaves_out_effort_and_thinking_and_refuses_promises_it_cannot_keep() -> None:
    form, messages = chat_format(K2), [UserMessage("Hi")]
    assert form.prompt_ids(messages, effort="low", thinking=False, tool_choice="auto") == form.prompt_ids(messages)
    for method in (form.prompt_ids, form.continuation_ids):
        with pytest.raises(UserError, match="tool choice 'required'"):
            method(messages, tool_choice="required")
        with pytest.raises(UserError, match="response format"):
            method(messages, response_format="json_object")


@each
@settings(max_examples=30, deadline=None)
@given(before=conversations(), reply=replies, new=conversations(), tools=st.lists(tool, max_size=2))
def test_prompt_turn_and_continuation_are_the_prompt_of_the_longer_conversation(
    tokenizer: Tokenizer, before: list[Message], reply: AssistantMessage, new: list[Message], tools: list[object]
) -> None:
    form = chat_format(tokenizer)
    before, new = sayable(tokenizer, before), sayable(tokenizer, new)
    results: list[Message] = [ToolMessage(one.name, "done", one.index) for one in reply.tool_calls]
    turn = turn_ids(tokenizer, before, reply)
    parser = form.parser()
    parser.push(turn)
    parsed = parser.finish()
    after = [*before, parsed]
    ids = form.prompt_ids(before, tools) + turn + form.closing_ids(turn) + form.continuation_ids([*results, *new], after=after)  # type: ignore[arg-type]
    assert ids == form.prompt_ids([*before, reply, *results, *new], tools)  # type: ignore[arg-type]


def test_k2_numbers_calls_through_a_conversation_held_as_ids() -> None:
    form = chat_format(K2)
    after: list[Message] = [
        UserMessage("go"),
        AssistantMessage(tool_calls=(ToolCall("f"), ToolCall("g"))),
        AssistantMessage(tool_calls=(ToolCall("f"), ToolCall("h", incomplete=True))),
    ]
    new: list[Message] = [ToolMessage("f", "r", 1), AssistantMessage(tool_calls=(ToolCall("g"),)), ToolMessage("g", "s", 1)]
    written = K2.decode(form.continuation_ids(new, after=after))
    assert "Return of functions.f:2\nr" in written
    assert "functions.g:4<|tool_call_argument_begin|>" in written
    assert "Return of functions.g:4\ns" in written


@each
@pytest.mark.parametrize("thinking", [True, False])
@settings(max_examples=40, deadline=None)
@given(reply=replies, data=st.data())
def test_a_turn_cut_anywhere_and_closed_is_a_message_that_was_ended(
    tokenizer: Tokenizer, thinking: bool, reply: AssistantMessage, data: st.DataObject
) -> None:
    form = chat_format(tokenizer)
    turn = turn_ids(tokenizer, [], reply, thinking)
    cut = data.draw(st.integers(0, len(turn)))
    check_closing(form, turn[:cut], thinking, well_formed=True)
    assert (form.closing_ids(turn[:cut], thinking=thinking) == []) == (cut == len(turn))


def check_closing(form: ChatFormat, sampled: list[int], thinking: bool, well_formed: bool) -> None:
    """Closing ends the message and changes nothing of what was said, but for a character cut in two."""
    parser, closed = form.parser(thinking=thinking), form.parser(thinking=thinking)
    parser.push(sampled)
    was_finished = parser.is_finished
    closed.push(sampled)
    closing = form.closing_ids(sampled, thinking=thinking)
    assert (closing == []) == was_finished
    closed.push(closing)
    assert closed.is_finished
    before, after = parser.finish(), closed.finish()
    assert after.response in (before.response, before.response + "\ufffd")
    assert after.thinking in (before.thinking, before.thinking + "\ufffd")
    assert len(before.tool_calls) <= len(after.tool_calls) <= len(before.tool_calls) + 1
    if well_formed:
        # Half a tag cannot always be made a whole one: its name and quotes are completed, its attributes are not.
        assert all(remark.startswith("unreadable tag") for remark in after.defects), after.defects
        assert not any(one.incomplete for one in after.tool_calls)


@each
@settings(max_examples=60, deadline=None)
@given(data=st.data(), thinking=st.booleans())
def test_whatever_was_sampled_can_be_closed(tokenizer: Tokenizer, data: st.DataObject, thinking: bool) -> None:
    tags = ["message", "think", "response", "tools", 'call tool="f" index="1"', 'argument key="k" type="string"', "json", "res", 'call x="']
    elements = [f"<|{kind}|>{tag}<|sep|>" for kind in ("open", "close") for tag in tags]
    controls = [name for name in tokenizer.special_names if "reserved" not in name]
    markup = st.sampled_from([*elements, *controls, *tags, "functions.f:0", "{}"]).map(lambda one: ids_of(one, tokenizer))
    pieces = st.one_of(markup, markup, st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3))
    ids = [token_id for piece in data.draw(st.lists(pieces, max_size=20)) for token_id in piece]
    check_closing(chat_format(tokenizer), ids, thinking, well_formed=False)


@pytest.mark.parametrize("thinking", [True, False])
@settings(max_examples=40, deadline=None)
@given(reply=st.builds(AssistantMessage, text, text), data=st.data())
def test_a_k3_message_cut_in_its_text_is_closed_as_it_would_have_been_written(
    thinking: bool, reply: AssistantMessage, data: st.DataObject
) -> None:
    form = chat_format(BYTES)
    turn = turn_ids(BYTES, [], reply, thinking)
    sampled = turn[: data.draw(st.integers(0, len(turn)))]
    parser = form.parser(thinking=thinking)
    parser.push(sampled)
    said = parser.finish()
    whole = sampled + form.closing_ids(sampled, thinking=thinking)
    parser = form.parser(thinking=thinking)
    parser.push(whole)
    if parser.finish() == AssistantMessage(said.response, said.thinking):  # no character was cut in two
        assert whole == turn_ids(BYTES, [], said, thinking)


@pytest.mark.parametrize(
    ("sampled", "closing"),
    [
        ("hm", "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"),
        ("hm<|close|>th", "ink<|sep|><|open|>response<|sep|><|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"),
        ("hm<|close|>think<|sep|><|open|>re", "sponse<|sep|><|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"),
        ("<|close|>think<|sep|><|open|>response<|sep|>ok[EOS]", "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"),
        (
            '<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
            '<|open|>argument key="a',
            '"<|sep|><|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>',
        ),
        ("<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|close|>message<|sep|>", "<|end_of_msg|>"),
        ("<|end_of_msg|>", ""),
    ],
)
def test_what_is_open_is_closed_innermost_first(sampled: str, closing: str) -> None:
    assert BYTES.decode(chat_format(BYTES).closing_ids(ids_of(sampled, BYTES))) == closing


def test_a_call_cut_off_stays_incomplete_in_the_message_parsed_from_the_sampled_ids() -> None:
    for tokenizer in (BPE, K2):
        form = chat_format(tokenizer)
        turn = turn_ids(tokenizer, [], AssistantMessage(tool_calls=(ToolCall("rm", {"path": "/tmp/a"}),)))
        end = tokenizer.special_id("<|close|>" if tokenizer is BPE else "<|tool_call_end|>")
        last_text = max(place for place, token_id in enumerate(turn) if token_id == end and turn[place - 1] < tokenizer.num_text_tokens)
        parser = form.parser()
        parser.push(turn[:last_text][: -1 if tokenizer is K2 else None])
        [one] = parser.finish().tool_calls
        assert one.incomplete
        assert not one.may_execute()


def test_a_conversation_that_went_on_after_a_cut_reads_as_its_messages() -> None:
    form = chat_format(BYTES)
    turn = turn_ids(BYTES, [], AssistantMessage(HOSTILE, "thoughts"))[:40]
    messages: list[Message] = [UserMessage("a")]
    ids = form.prompt_ids(messages, effort=None) + turn + form.closing_ids(turn) + form.continuation_ids([UserMessage("b")], after=messages)
    parts = parse_conversation(ids, BYTES)
    assert [part.defects for part in parts[:-1]] == [(), (), ()]
    parser = form.parser()
    parser.push(turn)
    said = parser.finish()
    assert [part.message for part in parts[:-1]] == [*messages, AssistantMessage(said.response, said.thinking), UserMessage("b")]


@each
def test_parsers_of_both_formats_stream_a_call_that_json_can_read(tokenizer: Tokenizer) -> None:
    reply = AssistantMessage("ok", "" if tokenizer is K2 else "hm", (ToolCall("f", {"a": [1, "é"], "b": "c"}),))
    parser = chat_format(tokenizer).parser()
    events = parser.push(turn_ids(tokenizer, [], reply))
    assert parser.is_finished
    [finished] = [event for event in events if type(event).__name__ == "CallFinished"]
    assert json.loads(finished.arguments_json) == {"a": [1, "é"], "b": "c"}  # type: ignore[union-attr]
