import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import UserError
from perilune.model.chat import (
    AssistantMessage,
    Message,
    OptionMessage,
    ToolCall,
    ToolDeclaration,
    ToolDeclarationMessage,
    ToolMessage,
    UserMessage,
    generation_prefix,
    in_call_order,
    render,
    render_continuation,
)
from perilune.model.chat_k2 import render_k2
from perilune.model.json_text import compact_json, json_string_piece, parse_json, split_json_object
from perilune.model.tokenizer import KIMI_K2, BpeTokenizer, ByteTokenizer, Segment, TiktokenTokenizer
from tests.model.conversations import CONVERSATION, GOLDEN, WEATHER, call, conversations, json_value, text, tool

BYTES = ByteTokenizer()
CONTROLS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]


def written(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def test_a_whole_conversation_reads_as_the_format_says() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    segments = render(CONVERSATION, [WEATHER], effort="low", tool_choice="required", response_format=schema)
    assert written(segments) == GOLDEN
    assert BYTES.decode(BYTES.encode(segments)) == GOLDEN


def test_instruct_mode_has_no_think_channel_and_no_effort() -> None:
    segments = render([AssistantMessage("Hi.", thinking="hidden")], thinking=False)
    assert written(segments) == (
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>Hi.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


def test_effort_is_max_unless_said_and_can_be_left_out() -> None:
    assert "`thinking_effort=max`" in written(render([]))
    assert render([], effort=None) == generation_prefix()
    assert written(render([], effort=None, response_format="json_object")).count("`response_format=json_object`") == 1
    assert render([], effort=None, tool_choice="auto") == generation_prefix()
    assert "MUST NOT call any tools" in written(render([], tool_choice="none"))


@settings(max_examples=30, deadline=None)
@given(messages=conversations(), tools=st.lists(tool, max_size=2))
def test_only_the_four_control_tokens_may_be_special_whatever_the_texts_spell(
    messages: list[Message], tools: list[ToolDeclaration]
) -> None:
    segments = render(messages, tools)
    control = [segment for segment in segments if segment.allow_special]
    assert all(segment.text in CONTROLS for segment in control)
    special = [token_id for token_id in BYTES.encode(segments) if BYTES.special_name(token_id)]
    assert special == [BYTES.special_id(segment.text) for segment in control]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), thinking=st.booleans())
def test_rendering_is_append_only(data: st.DataObject, thinking: bool) -> None:
    messages = data.draw(conversations(thinking))
    tools = data.draw(st.lists(tool, max_size=1))
    whole = render(messages, tools, thinking=thinking, add_generation_prefix=False)
    for cut in range(len(messages)):
        shorter = render(messages[:cut], tools, thinking=thinking, add_generation_prefix=False)
        assert whole[: len(shorter)] == shorter
        rest = render_continuation(messages[cut:], thinking=thinking, add_generation_prefix=False) if _may_cut(messages, cut) else None
        assert rest is None or shorter + rest == whole


def _may_cut(messages: list[Message], cut: int) -> bool:
    return not isinstance(messages[cut], ToolMessage) or not isinstance(messages[cut - 1], ToolMessage)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), thinking=st.booleans())
def test_prompt_and_sampled_ids_and_continuation_are_the_whole_conversation(data: st.DataObject, thinking: bool) -> None:
    before, after = data.draw(conversations(thinking)), data.draw(conversations(thinking))
    calls = tuple(data.draw(st.lists(call, max_size=2)))
    reply = AssistantMessage(data.draw(text), data.draw(text) if thinking else "", calls)
    sampled = BYTES.encode(render([reply], effort=None, thinking=thinking, add_generation_prefix=False)[len(generation_prefix(thinking)) :])
    held = BYTES.encode(render(before, thinking=thinking)) + sampled
    held += BYTES.encode(render_continuation(after, tool_choice="none", thinking=thinking))
    assert held == BYTES.encode(render([*before, reply, *after], tool_choice="none", thinking=thinking))


def test_targets_are_what_the_assistant_samples_and_not_malformed_arguments() -> None:
    ids, is_target = BYTES.encode_with_targets(render(CONVERSATION, [WEATHER], tool_choice="required"))
    trained = BYTES.decode([token_id for token_id, target in zip(ids, is_target, strict=True) if target])
    first = GOLDEN[GOLDEN.index("Need weather.") : GOLDEN.index('<|open|>message role="tool"')]
    last = GOLDEN[
        GOLDEN.index("<|close|>think<|sep|><|open|>response<|sep|>It") : GOLDEN.index('<|open|>message role="system" type="tool-choice"')
    ]
    assert trained == first.replace('<|open|>json type="object"<|sep|>{"city": "Bo<|close|>json<|sep|>', "") + last


def test_a_message_not_to_learn_from_reads_the_same_and_has_no_targets() -> None:
    kept = [message for message in CONVERSATION if not isinstance(message, ToolDeclarationMessage)]
    unlearned = [replace(message, learn=False) if isinstance(message, AssistantMessage) else message for message in kept]
    for write in (render, render_k2):
        assert written(write(unlearned)) == written(write(kept))
        assert any(segment.is_target for segment in write(kept))
        assert not any(segment.is_target for segment in write(unlearned))


def test_json_text_of_arguments_keeps_the_spelling_of_values() -> None:
    spelled = ToolCall("f", ' { "a" : 1e2 , "b" : [1, 2], "c": "x\\ny", "d":{"k": 1} } ')
    rendered = written(render([AssistantMessage(tool_calls=(spelled,))]))
    assert '<|open|>argument key="a" type="number"<|sep|>1e2<|close|>' in rendered
    assert '<|open|>argument key="b" type="array"<|sep|>[1, 2]<|close|>' in rendered
    assert '<|open|>argument key="c" type="string"<|sep|>x\ny<|close|>' in rendered
    assert '<|open|>argument key="d" type="object"<|sep|>{"k": 1}<|close|>' in rendered
    assert spelled.may_execute()
    assert render([AssistantMessage(tool_calls=(ToolCall("f", " "),))]) == render([AssistantMessage(tool_calls=(ToolCall("f"),))])


@given(members=st.dictionaries(text, json_value, max_size=4), indent=st.none() | st.integers(0, 2))
def test_splitting_an_object_gives_its_members(members: dict[str, object], indent: int | None) -> None:
    split = split_json_object(json.dumps(members, indent=indent))
    assert split is not None
    assert {key: value for key, (value, _) in split.items()} == members
    assert all(parse_json(literal) == value for value, literal in split.values())


@pytest.mark.parametrize("bad", ["", "[]", "3", "{", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a":1} x'])
def test_what_is_not_an_object_is_not_split(bad: str) -> None:
    assert split_json_object(bad) is None


@given(pieces=st.lists(text, max_size=4))
def test_escaped_pieces_join_to_the_escaped_whole(pieces: list[str]) -> None:
    assert "".join(map(json_string_piece, pieces)) == json_string_piece("".join(pieces))


def test_a_lone_surrogate_inside_json_is_written_as_an_escape() -> None:
    assert compact_json({"a": "\\\ud800é"}) == '{"a":"\\\\\\ud800é"}'
    messages = [AssistantMessage(tool_calls=(ToolCall("f", {"a": ["\ud800"]}),))]
    assert "\\ud800" in BYTES.decode(BYTES.encode(render(messages)))


def test_calls_are_numbered_by_their_place() -> None:
    message = AssistantMessage(tool_calls=(ToolCall("a", index=7), ToolCall("b")))
    assert [one.index for one in message.tool_calls] == [1, 2]
    assert replace(message, response="x").tool_calls == message.tool_calls


def test_results_out_of_call_order_are_refused_and_can_be_sorted() -> None:
    results = [ToolMessage("b", "2", 2), ToolMessage("a", "1", 1)]
    with pytest.raises(UserError, match="in_call_order"):
        render(results)
    with pytest.raises(UserError, match="one result"):
        render([results[0], results[0]])
    assert [result.index for result in in_call_order(results)] == [1, 2]
    render([*in_call_order(results), UserMessage("next"), results[1]])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [({"x": float("nan")}, "JSON"), ({"x": object()}, "object"), ({3: 4}, "not text"), ({"x": [{1, 2}]}, "JSON")],
)
def test_arguments_json_cannot_say_are_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        render([AssistantMessage(tool_calls=(ToolCall("f", arguments),))])  # type: ignore[arg-type]


def test_unknown_options_are_refused() -> None:
    for options in ({"effort": "medium"}, {"tool_choice": "weather"}, {"response_format": "xml"}):
        with pytest.raises(UserError, match="not one K3 knows"):
            render([], **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cut off"):
        render([AssistantMessage(tool_calls=(ToolCall("f", incomplete=True),))])
    with pytest.raises(UserError, match="1 for the first"):
        ToolMessage("f", "", 0)


def test_an_attribute_value_does_not_change_the_ids_around_it() -> None:
    bpe = BpeTokenizer.train(['tool="weather"' * 9, 'message role="user"' * 9], 300)
    one, other = (bpe.encode(render([ToolMessage(tool_name, "", 1)], effort=None)) for tool_name in ("weather", "w"))
    assert [token_id for token_id in one if token_id not in bpe.encode_text("weather")] == [
        token_id for token_id in other if token_id not in bpe.encode_text("weather") and token_id not in bpe.encode_text("w")
    ]


def test_the_k2_format_reads_as_its_template_says() -> None:
    messages: list[Message] = [
        UserMessage("Hi <|im_end|>"),
        AssistantMessage("", tool_calls=(ToolCall("f", {"a": 1}),)),
        ToolMessage("f", "one", 1),
        AssistantMessage("ok", tool_calls=(ToolCall("g"), ToolCall("f", '{"b": 2}'))),
        ToolMessage("f", "two", 2),
    ]
    segments = render_k2(messages, [ToolDeclaration("f", "d", {})])
    assert written(segments) == (
        '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"f","description":"d","parameters":{}}}]<|im_end|>'
        "<|im_user|>user<|im_middle|>Hi <|im_end|><|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a":1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\none<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>ok<|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        '<|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{"b": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.f:2\ntwo<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )
    tokenizer = TiktokenTokenizer({bytes([byte]): byte for byte in range(256)}, KIMI_K2)
    ids, is_target = tokenizer.encode_with_targets(segments)
    assert sum(token_id == tokenizer.end_of_message_id for token_id in ids) == 6  # five messages and the declaration, not the user's text
    trained = tokenizer.decode([token_id for token_id, target in zip(ids, is_target, strict=True) if target])
    assert trained.endswith("<|tool_calls_section_end|><|im_end|>")
    assert "Return of" not in trained
    with pytest.raises(UserError, match="no place"):
        render_k2([OptionMessage("thinking-effort", "")])
