import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.errors import UserError
from perilune.model.chat import (
    EFFORT_TEXT,
    AssistantMessage,
    Message,
    OptionMessage,
    ToolCall,
    ToolDeclarationMessage,
    UserMessage,
    generation_prefix,
    render,
)
from perilune.model.chat_parser import (
    ArgumentsDelta,
    AssistantParser,
    CallFinished,
    CallStarted,
    Event,
    MessageFinished,
    ResponseDelta,
    StrayText,
    ThinkDelta,
    parse_conversation,
)
from perilune.model.tokenizer import KIMI_K2, BpeTokenizer, ByteTokenizer, Segment, TiktokenTokenizer, Tokenizer
from tests.model.conversations import CONVERSATION, GOLDEN, HOSTILE, WEATHER, call, conversations, text, tool

BYTES = ByteTokenizer()
BPE = BpeTokenizer.train([GOLDEN.replace("<|", " ").replace("|>", " ")] * 3, 420)
both = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
replies = st.builds(AssistantMessage, text, text, st.lists(call, max_size=3).map(tuple))


def sampled(tokenizer: Tokenizer, reply: AssistantMessage, thinking: bool = True) -> list[int]:
    """The ids a model would sample to say `reply`, in canonical form."""
    return tokenizer.encode(
        render([reply], effort=None, thinking=thinking, add_generation_prefix=False)[len(generation_prefix(thinking)) :]
    )


def ids_of(markup: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return tokenizer.encode([Segment(markup, allow_special=True)])


def parse(ids: list[int], tokenizer: Tokenizer = BYTES, thinking: bool = True) -> AssistantMessage:
    parser = AssistantParser(tokenizer, thinking)
    parser.push(ids)
    return parser.finish()


def check_deltas(events: list[Event], message: AssistantMessage) -> None:
    """What was streamed is what the message says."""
    assert "".join(event.text for event in events if isinstance(event, ThinkDelta)) == message.thinking
    assert "".join(event.text for event in events if isinstance(event, ResponseDelta)) == message.response
    assert [(event.index, event.name) for event in events if isinstance(event, CallStarted)] == [
        (one.index, one.name) for one in message.tool_calls
    ]
    for one in message.tool_calls:
        deltas = [event for event in events if isinstance(event, ArgumentsDelta) and event.index == one.index]
        finished = [event for event in events if isinstance(event, CallFinished) and event.call.index == one.index]
        assert len(finished) == (0 if one.incomplete else 1)
        if isinstance(one.arguments, str):
            assert "".join(delta.text for delta in deltas) == one.arguments
        else:
            for key, value in one.arguments.items():
                streamed = "".join(delta.text for delta in deltas if delta.key == key)
                assert value == streamed if isinstance(value, str) else value == json.loads(streamed)
        if finished:
            assert finished[0].call == one
            assert "".join(delta.json_text for delta in deltas) == finished[0].arguments_json
            if not isinstance(one.arguments, str):
                assert json.loads(finished[0].arguments_json) == one.arguments


@both
@settings(max_examples=30, deadline=None)
@given(reply=replies, thinking=st.booleans())
def test_a_sampled_reply_parses_to_what_was_said(tokenizer: Tokenizer, reply: AssistantMessage, thinking: bool) -> None:
    parser = AssistantParser(tokenizer, thinking)
    events = [event for token_id in sampled(tokenizer, reply, thinking) for event in parser.push([token_id])]
    assert parser.is_finished
    expected = reply if thinking else AssistantMessage(reply.response, "", reply.tool_calls)
    assert events[-1] == MessageFinished(expected)
    assert parser.finish() == expected
    check_deltas(events, expected)


@both
@settings(max_examples=40, deadline=None)
@given(reply=replies, data=st.data())
def test_a_reply_cut_at_any_token_keeps_what_was_streamed(tokenizer: Tokenizer, reply: AssistantMessage, data: st.DataObject) -> None:
    ids = sampled(tokenizer, reply)
    cut = data.draw(st.integers(0, len(ids) - 1))
    parser = AssistantParser(tokenizer)
    events = parser.push(ids[:cut])
    message = parser.finish()
    check_deltas(events, message)
    assert "ended before <|end_of_msg|>" in message.defects
    assert reply.thinking.startswith(message.thinking)
    assert reply.response.startswith(message.response)
    whole = [one for one in message.tool_calls if not one.incomplete]
    assert tuple(whole) == reply.tool_calls[: len(whole)]
    assert len(message.tool_calls) <= len(whole) + 1


def test_every_prefix_of_a_conversation_parses_and_grows() -> None:
    ids = BPE.encode(render(CONVERSATION[1:5], effort=None))
    whole = parse_conversation(ids, BPE)
    for cut in range(len(ids)):
        parts = parse_conversation(ids[:cut], BPE)
        assert [part.message for part in parts[:-1]] == [part.message for part in whole[: max(0, len(parts) - 1)]]
        assert sum(part.end - part.start for part in parts) == cut


@both
@settings(max_examples=30, deadline=None)
@given(messages=conversations(), tools=st.lists(tool, max_size=2))
def test_a_whole_conversation_parses_to_its_messages_and_renders_back(
    tokenizer: Tokenizer, messages: list[Message], tools: list[object]
) -> None:
    ids = tokenizer.encode(render(messages, tools, add_generation_prefix=False))  # type: ignore[arg-type]
    parts = parse_conversation(ids, tokenizer)
    options: list[Message] = [ToolDeclarationMessage(tuple(tools), extends=False)] if tools else []  # type: ignore[arg-type]
    options.append(OptionMessage("thinking-effort", EFFORT_TEXT.format(effort="max")))
    parsed = [part.message for part in parts]
    assert parsed == [*options, *messages]
    assert not any(part.defects for part in parts)
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == len(ids)
    assert tokenizer.encode(render(parsed, effort=None, add_generation_prefix=False)) == ids  # type: ignore[arg-type]


def test_parts_say_which_ids_they_came_from() -> None:
    ids = BYTES.encode(render(CONVERSATION, [WEATHER]))
    for part in parse_conversation(ids, BYTES)[2:-1]:
        assert ids[part.start : part.end] == BYTES.encode(render([part.message], effort=None, add_generation_prefix=False))  # type: ignore[list-item]


@both
@settings(max_examples=80, deadline=None)
@given(data=st.data(), thinking=st.booleans())
def test_no_ids_make_the_parsers_raise(tokenizer: Tokenizer, data: st.DataObject, thinking: bool) -> None:
    tags = ["message", "think", "response", "tools", "call", "argument", "json", 'call tool="f" index="1"', 'call index="x" tool="g"']
    tags += [
        'argument key="k" type="string"',
        'argument key="n" type="number"',
        'message role="assistant"',
        'message role="tool" index="0"',
    ]
    controls = st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[PAD]"])
    elements = st.builds("<|{}|>{}<|sep|>".format, st.sampled_from(["open", "close"]), st.sampled_from(tags))
    markup = st.one_of(elements, elements, controls, st.sampled_from(["abc", "12", "{}", "  ", *tags])).map(lambda m: ids_of(m, tokenizer))
    pieces = st.one_of(markup, markup, st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3))
    ids = [token_id for piece in data.draw(st.lists(pieces, max_size=25)) for token_id in piece]
    parser = AssistantParser(tokenizer, thinking)
    events = [event for token_id in ids for event in parser.push([token_id])]
    message = parser.finish()
    assert message == parser.finish()
    assert "".join(event.text for event in events if isinstance(event, ThinkDelta)) == message.thinking
    assert "".join(event.text for event in events if isinstance(event, ResponseDelta)) == message.response
    finished = [event.call for event in events if isinstance(event, CallFinished)]
    assert finished == [one for one in message.tool_calls if not one.incomplete]
    for event in events:
        if isinstance(event, CallFinished) and not isinstance(event.call.arguments, str):
            assert json.loads(event.arguments_json) == event.call.arguments
    parts = parse_conversation(ids, tokenizer)
    assert sum(part.end - part.start for part in parts) == len(ids)


@settings(max_examples=30, deadline=None)
@given(reply=replies)
@example(reply=AssistantMessage("12", "漢字", (ToolCall("f", {"path": "a\nb"}),)))
def test_ids_that_are_not_canonical_parse_to_the_same_message(reply: AssistantMessage) -> None:
    # As if the model had sampled every text byte by byte.
    single = {BPE.token_bytes(token_id): token_id for token_id in range(BPE.num_text_tokens) if len(BPE.token_bytes(token_id)) == 1}
    odd = []
    for token_id in sampled(BPE, reply):
        odd += [token_id] if BPE.special_name(token_id) else [single[bytes([byte])] for byte in BPE.token_bytes(token_id)]
    assert parse(odd, BPE) == reply


@settings(max_examples=30, deadline=None)
@given(reply=replies)
def test_arguments_given_back_as_json_render_to_the_ids_that_were_sampled(reply: AssistantMessage) -> None:
    ids = sampled(BYTES, reply)
    finished = [event for event in AssistantParser(BYTES).push(ids) if isinstance(event, CallFinished)]
    again = tuple(ToolCall(event.call.name, event.arguments_json) for event in finished)
    assert sampled(BYTES, AssistantMessage(reply.response, reply.thinking, again)) == ids


def test_literals_the_model_spelled_its_own_way_survive_the_round_trip() -> None:
    markup = (
        'hm<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="number"<|sep|>1e2<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="array"<|sep|>[1, 2]<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    events = AssistantParser(BYTES).push(ids_of(markup))
    [finished] = [event for event in events if isinstance(event, CallFinished)]
    assert finished.arguments_json == '{"a":1e2,"b":[1, 2]}'
    assert finished.call == ToolCall("f", {"a": 100.0, "b": [1, 2]}, 1)
    assert sampled(BYTES, AssistantMessage("", "hm", (ToolCall("f", finished.arguments_json),))) == ids_of(markup)


def test_text_arguments_stream_as_they_are_sampled() -> None:
    parser = AssistantParser(BYTES)
    parser.push(ids_of("<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"))
    assert parser.push(ids_of('<|open|>call tool="write" index="1"<|sep|>')) == [CallStarted(1, "write")]
    assert parser.push(ids_of('<|open|>argument key="text" type="string"<|sep|>')) == [ArgumentsDelta(1, "text", "", '{"text":"')]
    assert parser.push(ids_of("a")) == [ArgumentsDelta(1, "text", "a", "a")]
    assert parser.push(ids_of("\n")) == [ArgumentsDelta(1, "text", "\n", "\\n")]
    assert parser.push(ids_of("<|close|>argument<|sep|>")) == [ArgumentsDelta(1, "text", "", '"')]
    whole = ToolCall("write", {"text": "a\n"}, 1)
    assert parser.push(ids_of("<|close|>call<|sep|>")) == [ArgumentsDelta(1, None, "", "}"), CallFinished(whole, '{"text":"a\\n"}')]


def test_text_that_spells_control_tokens_stays_text() -> None:
    reply = AssistantMessage(HOSTILE, HOSTILE, (ToolCall(HOSTILE, {HOSTILE: HOSTILE, "o": [HOSTILE]}),))
    assert parse(sampled(BYTES, reply)) == reply
    [part] = parse_conversation(BYTES.encode(render([UserMessage(HOSTILE, HOSTILE)], effort=None, add_generation_prefix=False)), BYTES)
    assert part.message == UserMessage(HOSTILE, HOSTILE)


CALLS = "<|close|>think<|sep|><|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|>"
END = "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("number", "abc"),
        ("number", "true"),
        ("number", '"5"'),
        ("number", "NaN"),
        ("number", "1e999"),
        ("number", "9" * 5000),
        ("number", ""),
        ("boolean", "True"),
        ("null", "none"),
        ("object", "[]"),
        ("object", '{"a": 1'),
        ("array", "{}"),
        ("array", "[" * 20_000),
        ("string ", "x"),
        ("date", "2026-01-01"),
        ("", "x"),
    ],
)
def test_an_argument_of_the_wrong_type_keeps_its_text_and_marks_the_call(kind: str, raw: str) -> None:
    markup = f'{CALLS}<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="{kind}"<|sep|>{raw}<|close|>argument<|sep|>'
    message = parse(ids_of(f"{markup}<|close|>call<|sep|>{END}"))
    [one] = message.tool_calls
    assert one.arguments == {"a": raw}
    assert one.malformed
    assert not one.incomplete
    assert not one.may_execute()
    assert message.defects == ()


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        # A call or argument left open is never whole, whatever closes around it.
        (f'{CALLS}<|open|>call tool="f" index="1"<|sep|>{END}', ToolCall("f", {}, 1, incomplete=True)),
        (
            f'{CALLS}<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x<|close|>call<|sep|>{END}',
            ToolCall("f", {"a": "x"}, 1, incomplete=True),
        ),
        (
            f'{CALLS}<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|open|>argument key="b" '
            f'type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>{END}',
            ToolCall("f", {"a": "1", "b": 2}, 1, incomplete=True),
        ),
        (
            f"{CALLS}<|open|>call<|sep|><|close|>call<|sep|>{END}",
            ToolCall("", {}, 1, defects=("the call names no tool", "call 1 has index None")),
        ),
        (
            f'{CALLS}<|open|>call tool="f" index="2"<|sep|><|close|>call<|sep|>{END}',
            ToolCall("f", {}, 1, defects=("call 1 has index '2'",)),
        ),
        (
            f'{CALLS}<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
            f'<|open|>argument key="a" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>{END}',
            ToolCall("f", {"a": 2}, 1, defects=("argument 'a' twice",)),
        ),
        (
            f'{CALLS}<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{{"a<|close|>json<|sep|>'
            f'<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>{END}',
            ToolCall("f", '{"a', 1, defects=("argument beside a block of arguments", "text outside the channels")),
        ),
        (
            f'{CALLS}<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x[PAD]y<|close|>argument<|sep|>'
            f"<|close|>call<|sep|>{END}",
            ToolCall("f", {"a": "xy"}, 1, defects=("[PAD] out of place",)),
        ),
    ],
)
def test_a_call_that_breaks_the_format_is_marked(markup: str, expected: ToolCall) -> None:
    message = parse(ids_of(markup))
    assert message.tool_calls == (expected,)
    assert not message.tool_calls[0].may_execute()
    assert message.response == "ok"


@pytest.mark.parametrize(
    ("markup", "thinking", "response", "num_calls", "defect"),
    [
        # The think channel is left open: what follows must not vanish into it.
        ("a<|open|>response<|sep|>b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", "a", "b", 0, "'think' left open"),
        ('a<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|end_of_msg|>', "a", "", 1, "outside the tools channel"),
        ("a<|close|>think<|sep|><|close|>message<|sep|><|end_of_msg|>", "a", "", 0, "no response channel"),
        (
            "a<|close|>think<|sep|>lost<|open|>response<|sep|>b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
            "a",
            "b",
            0,
            "text outside",
        ),
        ("a<|open|>plan<|sep|>x<|close|>plan<|sep|>b<|close|>think<|sep|><|end_of_msg|>", "ab", "", 0, "element 'plan' out of place"),
        ("a<|sep|>b<|end_of_msg|>", "ab", "", 0, "<|sep|> out of place"),
        ("a[PAD]b<|end_of_msg|>", "ab", "", 0, "[PAD] out of place"),
        ("a<|close|>thi<|close|>think<|sep|><|end_of_msg|>", "a", "", 0, "<|close|>thi out of place"),
        ("a<|close|>tools<|sep|>b<|end_of_msg|>", "ab", "", 0, "'tools' closed but not open"),
        ("a<|close|>think<|sep|><|open|>think<|sep|>b<|end_of_msg|>", "ab", "", 0, "channel think twice"),
        ("a<|open|>response x=<|sep|>b<|end_of_msg|>", "a", "b", 0, "unreadable tag"),
    ],
)
def test_a_message_that_breaks_the_format_keeps_what_can_be_read(
    markup: str, thinking: str, response: str, num_calls: int, defect: str
) -> None:
    message = parse(ids_of(markup))
    assert (message.thinking, message.response, len(message.tool_calls)) == (thinking, response, num_calls)
    assert any(defect in one for one in message.defects), message.defects


def test_ids_after_the_end_of_the_message_are_not_part_of_it() -> None:
    parser = AssistantParser(BYTES)
    parser.push(sampled(BYTES, AssistantMessage("a", "b")))
    assert parser.push(ids_of("<|open|>think<|sep|>more")) == []
    assert parser.finish() == AssistantMessage("a", "b")


def test_an_unfinished_character_is_held_back_and_dropped_at_the_end() -> None:
    parser = AssistantParser(BYTES)
    assert parser.push(BYTES.encode_text("é")[:1]) == []
    assert parser.finish().thinking == ""
    parser = AssistantParser(BYTES)
    parser.push(BYTES.encode_text("é")[:1])
    assert parser.push([BYTES.special_id("<|close|>")]) == [ThinkDelta("\ufffd")]


def test_defects_stay_few_and_short_however_long_the_nonsense() -> None:
    message = parse(ids_of("".join(f"<|open|>{number}{'x' * 500}<|sep|>" for number in range(100))))
    assert len(message.defects) <= 16
    assert max(map(len, message.defects)) <= 100


def test_a_tag_of_any_length_is_read_in_linear_time() -> None:
    for garbage in ("a" * 60_000, 'a="' * 20_000, " a=" * 20_000, '" ' * 30_000):
        assert not parse(ids_of(f"<|open|>response {garbage}<|sep|>b")).thinking


def test_a_conversation_with_gaps_is_read_as_far_as_it_goes() -> None:
    markup = (
        '[BOS]junk<|open|>message role="user"<|sep|>no end<|open|>message role="pope"<|sep|>hm<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="tool" tool="f" index="0"<|sep|>r<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>cut'
    )
    ids = ids_of(markup)
    parts = parse_conversation(ids, BYTES)
    assert [part.message for part in parts[:-1]] == [StrayText("[BOS]junk"), UserMessage("no end"), StrayText("hm"), StrayText("r")]
    assert isinstance(parts[-1].message, AssistantMessage)
    assert parts[-1].message.response == "cut"
    assert BYTES.decode(ids[parts[1].start : parts[1].end]) == '<|open|>message role="user"<|sep|>no end'
    assert [bool(part.defects) for part in parts] == [True] * 5
    assert parse_conversation([], BYTES) == ()


def test_a_vocabulary_of_the_other_family_is_refused() -> None:
    tokenizer = TiktokenTokenizer({bytes([byte]): byte for byte in range(256)}, KIMI_K2)
    with pytest.raises(UserError, match="family"):
        AssistantParser(tokenizer)
    with pytest.raises(UserError, match="outside this vocabulary"):
        AssistantParser(BYTES).push([268])
