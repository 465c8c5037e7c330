import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.model.chat import AssistantMessage, ToolCall, ToolDeclaration, UserMessage
from perilune.model.chat_format import chat_format
from perilune.model.chat_parser import AssistantParser, CallFinished, CallStarted
from perilune.model.tokenizer import KIMI_K2, Segment, TiktokenTokenizer
from perilune.serve.api.call_arguments import CallArguments
from perilune.serve.api.chat_answer import ChatChunks, chat_choice
from perilune.serve.api.chat_reader import ChatPiece, ChatReader
from perilune.serve.api.chat_request import ChatRequest
from perilune.serve.api.responses import ChatChoice, ChatChunkChoice
from perilune.serve.generation import FinishReason, SampledToken
from tests.model.conversations import call as any_call
from tests.serve.api.fake_engine import NAME, TOKENIZER, FakeEngine, logprob, message_ids, post, stream, text_ids

PATH = "/v1/chat/completions"
FORMAT = chat_format(TOKENIZER)
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": {"type": "object"}}}
CALL = ToolCall("weather", {"city": "Zürich", "days": 3})
REPLY = AssistantMessage("It is sunny. ☀ Bye.", "Let me think. 🤔")
CALLING = AssistantMessage("I look.", "Hm.", (CALL, ToolCall("weather")))


def body(**fields: object) -> dict[str, object]:
    return {"model": NAME, "messages": [{"role": "user", "content": "Hello."}], **fields}


def ask_once(reply: AssistantMessage, **fields: object) -> dict[str, Any]:
    answer = post(FakeEngine(message_ids(reply)), PATH, body(**fields))
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


# Whole answers.


def test_reasoning_and_response_are_told_apart() -> None:
    engine = FakeEngine(message_ids(REPLY))
    whole = post(engine, PATH, body()).json()
    assert whole["object"] == "chat.completion" and whole["model"] == NAME and whole["id"].startswith("chatcmpl-")
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": REPLY.response, "refusal": None, "reasoning_content": REPLY.thinking},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    prompt, answer = len(engine.requests[0].prompt_ids), len(message_ids(REPLY))
    assert whole["usage"] == {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def test_the_prompt_is_the_conversation_in_the_models_format() -> None:
    engine = FakeEngine(message_ids(REPLY))
    tool = ToolDeclaration("weather", "Says it.", {"type": "object"})
    for fields, wanted in (
        ({}, FORMAT.prompt_ids([UserMessage("Hello.")])),
        ({"reasoning_effort": "low"}, FORMAT.prompt_ids([UserMessage("Hello.")], effort="low")),
        ({"reasoning_effort": "none"}, FORMAT.prompt_ids([UserMessage("Hello.")], effort=None, thinking=False)),
        ({"tools": [WEATHER]}, FORMAT.prompt_ids([UserMessage("Hello.")], [tool])),
        ({"tools": [WEATHER], "tool_choice": "none"}, FORMAT.prompt_ids([UserMessage("Hello.")], [tool], tool_choice="none")),
        ({"tool_choice": "none"}, FORMAT.prompt_ids([UserMessage("Hello.")])),
    ):
        assert post(engine, PATH, body(**fields)).status_code == 200
        assert list(engine.requests[-1].prompt_ids) == wanted
        assert set(engine.requests[-1].sampling.stop_token_ids) == set(FORMAT.end_ids)


def test_without_thinking_the_answer_begins_with_the_response() -> None:
    engine = FakeEngine(message_ids(AssistantMessage("Hi."), thinking=False))
    message = post(engine, PATH, body(reasoning_effort="none")).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hi.", "refusal": None}


def test_calls_are_returned_with_their_arguments_as_json_text() -> None:
    choice = ask_once(CALLING, tools=[WEATHER])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": '{"city":"Zürich","days":3}'},
        {"name": "weather", "arguments": "{}"},
    ]
    assert all(call["type"] == "function" and call["id"].startswith("call_") and len(call["id"]) > 20 for call in calls)
    assert calls[0]["id"] != calls[1]["id"]


def test_a_message_of_calls_alone_has_no_content() -> None:
    assert ask_once(AssistantMessage("", "", (CALL,)), tools=[WEATHER])["choices"][0]["message"]["content"] is None


def cut_in_second_call() -> list[int]:
    """Up to the end of the second call's arguments, which is not closed."""
    ids = message_ids(AssistantMessage("", "", (CALL, CALL)))
    closing = len(text_ids("argument")) + 2 + len(text_ids("call")) + 2 + len(text_ids("tools")) + 2 + len(text_ids("message")) + 3
    return ids[:-closing]


def test_a_call_that_is_cut_off_is_left_out_and_is_no_json_object_in_a_stream() -> None:
    ids = cut_in_second_call()
    choice = post(FakeEngine(ids), PATH, body(tools=[WEATHER], max_tokens=len(ids))).json()["choices"][0]
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city":"Zürich","days":3}']
    assert choice["finish_reason"] == "tool_calls"
    arguments = {0: "", 1: ""}
    for event in stream(FakeEngine(ids), PATH, body(tools=[WEATHER], max_tokens=len(ids))):
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
    assert arguments == {0: '{"city":"Zürich","days":3}', 1: '{"city":"Zürich","days":'}


def test_a_call_that_is_cut_off_before_its_arguments_is_not_shown_at_all() -> None:
    ids = message_ids(AssistantMessage("", "", (CALL,)))
    cut = next(
        end for end in range(len(ids)) if any(isinstance(event, CallStarted) for event in AssistantParser(TOKENIZER).push(ids[:end]))
    )
    for event in stream(FakeEngine(ids), PATH, body(tools=[WEATHER], max_tokens=cut)):
        assert "tool_calls" not in event["choices"][0]["delta"]


def test_an_answer_cut_off_in_its_only_call_ended_by_length() -> None:
    ids = message_ids(AssistantMessage("", "", (CALL,)))[:-20]
    choice = post(FakeEngine(ids), PATH, body(tools=[WEATHER], max_tokens=len(ids))).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"] and choice["message"]["content"] == ""


def test_a_whole_but_malformed_call_is_shown_as_written_and_is_no_reason_to_execute() -> None:
    malformed = AssistantMessage("", "", (ToolCall("weather", "{not JSON}"),))
    choice = ask_once(malformed, tools=[WEATHER])["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{not JSON}"}
    assert choice["finish_reason"] == "stop"
    both = replace(malformed, tool_calls=(*malformed.tool_calls, CALL))
    assert ask_once(both, tools=[WEATHER])["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}, {}])
def test_where_no_call_is_allowed_the_answer_ends_before_it_and_so_does_the_engines_work(fields: dict[str, object]) -> None:
    engine = FakeEngine(message_ids(CALLING))
    whole = post(engine, PATH, body(**fields)).json()
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in whole["choices"][0]["message"] and whole["choices"][0]["message"]["content"] == "I look."
    assert engine.left == [engine.requests[0].request_id]
    assert whole["usage"]["completion_tokens"] < len(message_ids(CALLING))
    for event in stream(FakeEngine(message_ids(CALLING)), PATH, body(**fields)):
        assert "tool_calls" not in event["choices"][0]["delta"]
        assert event["choices"][0]["finish_reason"] in (None, "stop")


def test_n_choices_are_sampled_at_once_each_with_its_seed() -> None:
    engine = FakeEngine(*(message_ids(AssistantMessage(text)) for text in ("one", "two", "three")))
    whole = post(engine, PATH, body(n=3, seed=5)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["one", "two", "three"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len({request.sampling.seed for request in engine.requests}) == len({request.request_id for request in engine.requests}) == 3
    prompt = len(engine.requests[0].prompt_ids)
    answers = sum(len(message_ids(AssistantMessage(text))) for text in ("one", "two", "three"))
    assert whole["usage"] == {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


def test_a_stop_string_is_looked_for_in_the_response_alone() -> None:
    reply = AssistantMessage("Say the word, then STOP it.", "STOP is a word.", (ToolCall("weather", {"city": "STOP"}),))
    choice = ask_once(reply, stop="STOP", tools=[WEATHER])["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Say the word, then ", "STOP is a word.")
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


def test_a_stop_string_that_has_only_begun_is_shown_once_the_response_is_over() -> None:
    reply = AssistantMessage("It is ST", "", (CALL,))
    choice = ask_once(reply, stop=["STOP"], tools=[WEATHER])["choices"][0]
    assert choice["message"]["content"] == "It is ST" and choice["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in stream(FakeEngine(message_ids(reply)), PATH, body(stop="STOP", tools=[WEATHER]))]
    first_call = next(place for place, delta in enumerate(deltas) if "tool_calls" in delta)
    assert "".join(delta.get("content", "") for delta in deltas[:first_call]) == "It is ST"


def test_a_stop_string_that_has_only_begun_is_shown_where_the_answer_is_cut_off() -> None:
    ids = message_ids(AssistantMessage("It is STOPPED"), thinking=False)[: len("It is ST")]
    fields = body(stop="STOP", reasoning_effort="none", max_tokens=len(ids))
    assert post(FakeEngine(ids), PATH, fields).json()["choices"][0]["message"]["content"] == "It is ST"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in stream(FakeEngine(ids), PATH, fields)) == "It is ST"


def test_a_stop_token_of_the_request_ends_the_answer_unseen() -> None:
    choice = ask_once(REPLY, stop_token_ids=[ord("y")], return_token_ids=True)["choices"][0]
    assert choice["message"]["content"] == "It is sunn"
    assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] == ord("y")


def test_with_ignore_eos_what_follows_the_message_counts_and_is_not_shown() -> None:
    length = len(message_ids(REPLY)) + 5
    whole = ask_once(REPLY, ignore_eos=True, max_tokens=length)
    assert whole["choices"][0]["message"]["content"] == REPLY.response
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", length)


def test_ids_that_the_tokenizer_does_not_have_are_tokens_without_text() -> None:
    ids = message_ids(AssistantMessage("Hi."))
    ids[-12:-12] = [TOKENIZER.vocab_size + 3]
    choice = post(FakeEngine(ids), PATH, body(logprobs=True)).json()["choices"][0]
    assert choice["message"]["content"] == "Hi."
    assert {"token": "", "logprob": logprob(271), "bytes": [], "top_logprobs": []} in choice["logprobs"]["content"]


def test_every_token_has_one_logprob_with_its_text_and_bytes() -> None:
    whole = ask_once(AssistantMessage("é!"), logprobs=True, top_logprobs=2)
    entries = whole["choices"][0]["logprobs"]["content"]
    ids = message_ids(AssistantMessage("é!"))
    assert whole["choices"][0]["logprobs"]["refusal"] is None
    assert [entry["logprob"] for entry in entries] == [logprob(token_id) for token_id in ids]
    assert len(entries) == whole["usage"]["completion_tokens"]
    by_token = {entry["token"]: entry for entry in entries}
    assert by_token["bytes:\\xc3"]["bytes"] == [0xC3] and by_token["bytes:\\xa9"]["bytes"] == [0xA9]
    assert by_token["!"]["bytes"] == [33]
    assert by_token["<|end_of_msg|>"]["bytes"] == list(b"<|end_of_msg|>")
    assert by_token["!"]["top_logprobs"] == [
        {"token": "\x00", "logprob": logprob(0), "bytes": [0]},
        {"token": "\x01", "logprob": logprob(1), "bytes": [1]},
    ]
    assert ask_once(REPLY, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_a_probability_of_zero_has_a_logprob_that_json_can_say() -> None:
    class Certain(FakeEngine):
        def _top(self, token_id: int, number: int) -> tuple[tuple[int, float], ...]:
            return ((token_id, 0.0), (1, float("-inf")))

    answer = post(Certain(message_ids(REPLY)), PATH, body(logprobs=True, top_logprobs=2))
    assert [top["logprob"] for top in answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]] == [0.0, -9999.0]


def test_token_ids_are_returned_on_demand() -> None:
    engine = FakeEngine(message_ids(REPLY))
    whole = post(engine, PATH, body(return_token_ids=True)).json()
    assert whole["prompt_token_ids"] == list(engine.requests[0].prompt_ids)
    assert whole["choices"][0]["token_ids"] == message_ids(REPLY)


# Streams.


def test_a_stream_begins_with_the_role_and_ends_with_the_finish_reason_and_the_usage() -> None:
    engine = FakeEngine(message_ids(REPLY))
    first, *events, finish, last = stream(engine, PATH, body(stream_options={"include_usage": True}))
    assert first["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}]
    assert finish["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": None}]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(message_ids(REPLY))
    assert {event["object"] for event in (first, *events, finish, last)} == {"chat.completion.chunk"}
    assert len({event["id"] for event in (first, *events, finish, last)}) == 1
    assert all("usage" not in event for event in (first, *events, finish))
    assert "".join(event["choices"][0]["delta"].get("reasoning_content", "") for event in events) == REPLY.thinking
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == REPLY.response


def test_a_call_streams_its_id_and_name_first_then_its_arguments() -> None:
    events = stream(FakeEngine(message_ids(CALLING)), PATH, body(tools=[WEATHER]))
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    firsts = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in firsts] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "weather", "arguments": ""}),
    ]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls if call not in firsts)
    assert calls[0] is firsts[0]
    assert len([call for call in calls if call["index"] == 0]) > 5  # they stream, they do not come in one piece
    for index, wanted in enumerate(('{"city":"Zürich","days":3}', "{}")):
        assert "".join(call["function"]["arguments"] for call in calls if call["index"] == index) == wanted
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_choices_stream_side_by_side() -> None:
    texts = ["one", "two"]
    events = stream(FakeEngine(*(message_ids(AssistantMessage(text)) for text in texts)), PATH, body(n=2))
    order = [event["choices"][0]["index"] for event in events]
    assert order != sorted(order)
    for index, text in enumerate(texts):
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == index]
        assert deltas[0]["role"] == "assistant" and "".join(delta.get("content", "") for delta in deltas) == text
    assert [event["choices"][0]["finish_reason"] for event in events].count("stop") == 2


def test_a_stream_carries_every_tokens_id_and_logprob_once() -> None:
    fields = body(logprobs=True, return_token_ids=True, stop="☀", stream_options={"include_usage": True})
    engine = FakeEngine(message_ids(REPLY))
    *events, last = stream(engine, PATH, fields)
    ids = [token_id for event in events for token_id in event["choices"][0]["token_ids"]]
    logprobs = [
        entry["logprob"] for event in events if event["choices"][0]["logprobs"] for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert logprobs == [logprob(token_id) for token_id in ids]
    assert len(ids) == last["usage"]["completion_tokens"]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [list(engine.requests[0].prompt_ids)]
    whole = post(FakeEngine(message_ids(REPLY)), PATH, body(logprobs=True, return_token_ids=True, stop="☀")).json()
    assert whole["choices"][0]["token_ids"] == ids
    assert TOKENIZER.decode_bytes(ids).endswith("☀".encode())  # through the token that completed the stop string


# The other chat format, of Kimi K2 and Kimi Linear.

K2 = TiktokenTokenizer({bytes([byte]): byte for byte in range(256)}, KIMI_K2)


def k2_engine(said: str, **settings: int) -> FakeEngine:
    engine = FakeEngine(K2.encode([Segment(said, allow_special=True)]), **settings)
    engine.vocab_size = K2.vocab_size
    return engine


K2_CALL = "<|tool_call_begin|>functions.weather:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
K2_CALLS = (
    "Hm.<|tool_calls_section_begin|>"
    + K2_CALL.format(0, '{"a": {"b": 1}}')
    + K2_CALL.format(1, "")
    + "<|tool_calls_section_end|><|im_end|>"
)


def test_k2_answers_have_calls_and_no_reasoning() -> None:
    engine = k2_engine(K2_CALLS)
    choice = post(engine, PATH, body(tools=[WEATHER]), K2).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hm.", "tool_calls")
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"a": {"b": 1}}', ""]
    assert set(engine.requests[0].sampling.stop_token_ids) == {K2.special_id("<|im_end|>"), K2.special_id("[EOS]")}
    assert post(k2_engine(K2_CALLS), PATH, body(), K2).json()["choices"][0]["message"]["content"] == "Hm."


def test_k2_arguments_stream_and_a_call_that_is_cut_off_is_no_json_object() -> None:
    cut = len(K2.encode([Segment(K2_CALLS.split("<|tool_call_end|>")[0], allow_special=True)]))
    deltas = [event["choices"][0]["delta"] for event in stream(k2_engine(K2_CALLS), PATH, body(tools=[WEATHER], max_tokens=cut), K2)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert len(calls) > 5 and calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": {"b": 1}'
    whole = [event["choices"][0]["delta"] for event in stream(k2_engine(K2_CALLS), PATH, body(tools=[WEATHER]), K2)]
    first = [call for delta in whole for call in delta.get("tool_calls", ()) if call["index"] == 0]
    assert "".join(call["function"]["arguments"] for call in first) == '{"a": {"b": 1}}'
    assert [call["function"] for delta in whole for call in delta.get("tool_calls", ()) if call["index"] == 1] == [
        {"name": "weather", "arguments": ""}
    ]


def test_k2_arguments_that_were_cut_off_before_they_began_are_not_shown_as_none() -> None:
    said = K2_CALLS.replace("{", "   {", 1)
    cut = len(K2.encode([Segment(said.split("{")[0], allow_special=True)]))
    for event in stream(k2_engine(said), PATH, body(tools=[WEATHER], max_tokens=cut), K2):
        assert "tool_calls" not in event["choices"][0]["delta"]


def test_k2_cannot_be_told_not_to_call() -> None:
    answer = post(k2_engine(K2_CALLS), PATH, body(tools=[WEATHER], tool_choice="none"), K2)
    assert answer.status_code == 400 and "tool choice" in answer.json()["error"]["message"]


# Any tokens.


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def read(ids: Sequence[int], request: ChatRequest, reason: FinishReason = "stop") -> list[ChatPiece]:
    """What the reader makes of `ids`, after which the engine stops for `reason`."""
    reader = ChatReader(FORMAT.parser(), request.stop, request.may_call, TOKENIZER.vocab_size, request.stop_token_ids)
    pieces = []
    for token_id in ids:
        pieces.append(reader.push(SampledToken(token_id, logprob(token_id), 0)))
        if reader.is_over:
            return [*pieces, reader.finish("stop")]
    return [*pieces, reader.finish(reason)]


def test_calls_of_an_answer_that_was_aborted_are_shown_and_its_finish_reason_stays() -> None:
    request = request_with([])
    choice = chat_choice(0, request, TOKENIZER, read(message_ids(CALLING)[:-1], request, "abort"))
    assert len(choice.message.tool_calls or ()) == 2 and choice.finish_reason == "abort"


def both_ways(pieces: Sequence[ChatPiece], request: ChatRequest) -> tuple[ChatChoice, list[ChatChunkChoice]]:
    writer = ChatChunks(0, request, TOKENIZER)
    return chat_choice(0, request, TOKENIZER, pieces), [choice for piece in pieces for choice in writer.take(piece)]


def request_with(stop: list[str]) -> ChatRequest:
    return ChatRequest.model_validate(body(stop=stop, tools=[WEATHER], logprobs=True, return_token_ids=True))


text = st.text("ab🤔é", max_size=8)
replies = st.builds(AssistantMessage, text, text, st.lists(any_call, max_size=2).map(tuple))
stop_lists = st.lists(st.text("ab🤔é", min_size=1, max_size=3), max_size=3)
some_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1) | st.sampled_from([258, 259, 260, 261]), max_size=6)


@settings(max_examples=150, deadline=None)
@given(replies, stop_lists, st.data())
def test_the_stream_joins_to_the_whole_answer_for_any_tokens(reply: AssistantMessage, stop: list[str], data: st.DataObject) -> None:
    ids = message_ids(reply)
    place = data.draw(st.integers(0, len(ids)))
    ids[place:place] = data.draw(some_ids)
    del ids[data.draw(st.integers(0, len(ids))) :]
    request = request_with(stop)
    whole, chunks = both_ways(read(ids, request), request)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (whole.message.content or "")
    assert "".join(chunk.delta.reasoning_content or "" for chunk in chunks) == (whole.message.reasoning_content or "")
    assert [token_id for chunk in chunks for token_id in chunk.token_ids or ()] == whole.token_ids
    streamed_logprobs = [entry for chunk in chunks if chunk.logprobs is not None for entry in chunk.logprobs.content]
    assert whole.logprobs is not None and streamed_logprobs == whole.logprobs.content
    assert [entry.logprob for entry in streamed_logprobs] == [logprob(token_id) for token_id in whole.token_ids or ()]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    calls: dict[int, str] = {}
    for chunk in chunks:
        for call in chunk.delta.tool_calls or ():
            calls[call.index] = calls.get(call.index, "") + call.function.arguments
    returned = [call.function.arguments for call in whole.message.tool_calls or ()]
    assert list(calls) == list(range(len(calls)))
    rest = list(calls.values())
    for arguments in returned:
        rest.remove(arguments)
    assert not any(is_object(arguments) or not arguments.strip() for arguments in rest)


@settings(max_examples=100, deadline=None)
@given(replies, stop_lists, st.data())
def test_an_answer_is_what_the_parser_reads_up_to_the_first_stop_string(
    reply: AssistantMessage, stop: list[str], data: st.DataObject
) -> None:
    """Against a slow twin, which parses every beginning of the ids anew."""
    ids = message_ids(reply)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    places: list[tuple[int, str]] = []
    for end in range(len(ids) + 1):
        parser = AssistantParser(TOKENIZER)
        parser.push(ids[:end])
        message = parser.finish()
        places = [(message.response.find(one), one) for one in stop if one in message.response]
        if places:
            ids, message = ids[:end], replace(message, response=message.response[: min(places)[0]], tool_calls=())
            break
    request = request_with(stop)
    choice = chat_choice(0, request, TOKENIZER, read(ids + text_ids("more") * bool(places), request, "length"))
    assert (choice.message.content or "", choice.message.reasoning_content or "") == (message.response, message.thinking)
    assert choice.token_ids == ids
    whole = [call for call in message.tool_calls if not call.incomplete]
    events = [] if places else AssistantParser(TOKENIZER).push(ids)
    written = [(event.call.name, event.arguments_json) for event in events if isinstance(event, CallFinished)]
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == written
    may_execute = any(call.may_execute() for call in whole)
    assert choice.finish_reason == ("stop" if places else "tool_calls" if may_execute else "length")


json_values = st.recursive(
    st.none() | st.integers() | st.text('a{}[]"\\ ', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a}"\\', max_size=2), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text('a}"\\', max_size=2), json_values, max_size=3)
anything = st.text('{}[]":\\a1, ', max_size=12)


@settings(deadline=None)
@given(st.builds(lambda before, value, after: before + json.dumps(value) + after, st.sampled_from(["", " "]), objects, anything) | anything)
def test_arguments_that_are_not_closed_are_neither_empty_nor_an_object_wherever_they_are_cut(text: str) -> None:
    arguments = CallArguments()
    shown = ""
    for character in text:
        new = arguments.push(character)
        shown += new
        if new:
            assert shown.strip()
            assert not is_object(shown)
    assert shown + arguments.close() == text


def test_arguments_stream_up_to_the_brace_that_closes_them() -> None:
    arguments = CallArguments()
    assert [arguments.push(text) for text in (" ", '{"a":', '{"b":"}"}', ', "c":1', "} ", " x")] == [
        "",
        ' {"a":',
        '{"b":"}"}',
        ', "c":1',
        "",
        "",
    ]
    assert arguments.close() == "}  x"
