from typing import Any

import pytest
from pydantic import ValidationError

from perilune.model.chat import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage
from perilune.serve.api.chat_request import ChatMessage, ChatRequest
from perilune.serve.api.conversation import conversation
from tests.serve.api.fake_engine import NAME, TOKENIZER, FakeEngine, completion_ids, post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello."}]


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": NAME, "messages": HELLO, "max_tokens": 2, **fields}


def completion_body(**fields: object) -> dict[str, object]:
    return {"model": NAME, "prompt": "Hello.", "max_tokens": 2, **fields}


def refusal(path: str, body: object) -> dict[str, Any]:
    """The error that answers `body`; nothing of it reached the engine."""
    engine = FakeEngine()
    answer = post(engine, path, body)
    assert answer.status_code == 400, answer.text
    assert engine.requests == []
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


UNSUPPORTED = {
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"50": -100},
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "min_p": 0.1,
    "min_tokens": 3,
    "truncate_prompt_tokens": 5,
    "temperture": 1,
}
UNSUPPORTED_IN_CHAT = {
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "ash", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "web_search_options": {},
    "verbosity": "low",
    "prompt_cache_key": "x",
    "safety_identifier": "x",
    "echo": False,
}
UNSUPPORTED_IN_COMPLETIONS = {"best_of": 2, "echo": True, "suffix": "end", "messages": HELLO, "top_logprobs": 2, "tools": []}


@pytest.mark.parametrize(("field", "value"), [*UNSUPPORTED.items(), *UNSUPPORTED_IN_CHAT.items()])
def test_chat_refuses_by_name_what_it_does_not_honour(field: str, value: object) -> None:
    error = refusal(CHAT, chat_body(**{field: value}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert field in error["message"]


@pytest.mark.parametrize(("field", "value"), [*UNSUPPORTED.items(), *UNSUPPORTED_IN_COMPLETIONS.items()])
def test_completions_refuse_by_name_what_they_do_not_honour(field: str, value: object) -> None:
    error = refusal(COMPLETIONS, completion_body(**{field: value}))
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(("field", "value"), [("frequency_penalty", False), ("store", 0), ("logit_bias", []), ("min_tokens", "0")])
def test_what_only_resembles_a_value_that_asks_for_nothing_is_refused(field: str, value: object) -> None:
    assert refusal(CHAT, chat_body(**{field: value}))["param"] == field


def test_values_that_ask_for_nothing_pass() -> None:
    nothing = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "metadata": {},
        "store": False,
        "service_tier": "auto",
        "min_p": 0,
        "min_tokens": 0,
        "user": "someone",
        "n": 1,
        "top_k": -1,
        "seed": None,
        "stop": None,
        "stream": False,
        "stream_options": None,
        "no_such_field": None,
    }
    in_chat = {
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "verbosity": "medium",
        "functions": [],
        "tools": [],
        "tool_choice": "auto",
        "top_logprobs": 0,
        "reasoning_effort": None,
    }
    in_completions = {"best_of": 1, "echo": False, "suffix": None, "logprobs": None}
    assert post(FakeEngine(), CHAT, chat_body(**nothing, **in_chat)).status_code == 200
    assert post(FakeEngine(), COMPLETIONS, completion_body(**nothing, **in_completions)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("max_completion_tokens", 3),
        ("seed", 2**63),
        ("seed", -1),
        ("seed", "7"),
        ("stop", 7),
        ("stop", [""]),
        ("stop", [None]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 1001),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [268]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("n", 0),
        ("n", 17),
        ("n", True),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("user", 3),
        ("ignore_eos", "yes"),
        ("return_token_ids", 1),
        ("model", 3),
        ("model", None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_value_out_of_range_or_of_the_wrong_type_is_refused_by_name(path: str, field: str, value: object) -> None:
    body = (chat_body if path == CHAT else completion_body)(**{field: value})
    answer = post(FakeEngine(), path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in (field, f"{field}[0]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"reasoning_effort": ["low"]}, "reasoning_effort"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hello."}, "messages"),
        ({"messages": ["Hello."]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"content": ""}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": "", "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "assistant", "content": "", "name": "x"}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": "", "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ],
)
def test_chat_names_the_field_that_is_wrong(fields: dict[str, object], param: str) -> None:
    assert refusal(CHAT, chat_body(**fields))["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_a_part_that_is_not_text_is_refused_where_it_stands(kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AA"}}]
    error = refusal(CHAT, chat_body(messages=[*HELLO, {"role": "user", "content": parts}]))
    assert error["param"] == "messages[1].content[1].type"
    assert kind in error["message"]


def test_the_efforts_that_work_are_named() -> None:
    message = refusal(CHAT, chat_body(reasoning_effort="medium"))["message"]
    assert all(effort in message for effort in ("'medium'", "low", "high", "max", "none"))


@pytest.mark.parametrize("prompt", [[], 3, [1, "a"], ["a", 1], [[1], "a"], [True], [1.5], [[1.5]], {"a": 1}, ["a"] * 1025, "\ud800"])
def test_a_prompt_is_text_or_ids_or_a_list_of_one_of_them(prompt: object) -> None:
    assert refusal(COMPLETIONS, completion_body(prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""], [[]], [268], [-1], [[1], [2, 268]]])
def test_a_prompt_without_tokens_or_with_unknown_ones_is_refused(prompt: object) -> None:
    assert refusal(COMPLETIONS, completion_body(prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_longer_than_the_engine_takes_has_a_code_of_its_own(path: str) -> None:
    body = chat_body if path == CHAT else completion_body
    error = refusal(path, body(max_tokens=4096))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    error = refusal(path, body(**{"messages": [{"role": "user", "content": "a" * 5000}]} if path == CHAT else {"prompt": "a" * 4096}))
    assert (error["param"], error["code"]) == ("messages" if path == CHAT else "prompt", "context_length_exceeded")


def test_a_prompt_that_fills_the_longest_sequence_has_no_room_and_one_token_less_has() -> None:
    body = {"model": NAME, "prompt": [1] * 100}
    assert post(FakeEngine(max_length=100), COMPLETIONS, body).json()["error"]["code"] == "context_length_exceeded"
    engine = FakeEngine(max_length=101)
    assert post(engine, COMPLETIONS, body).status_code == 200
    assert engine.requests[0].sampling.max_tokens == 1  # of the default 16, what there is room for


def test_an_error_for_one_unknown_field_is_not_an_error_for_each_of_many() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(chat_body(**{f"field_{number}": 1 for number in range(100)}))
    assert [error["loc"] for error in caught.value.errors()] == [("field_0",)]


@pytest.mark.parametrize("fields", [{"messages": [0] * 100}, {"tools": [0] * 100}, {"stop_token_ids": ["a"] * 100}])
def test_a_list_is_read_up_to_its_first_mistake(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(chat_body(**fields))
    assert caught.value.error_count() == 1


def test_the_choices_of_a_seed_have_different_seeds_and_the_first_has_that_of_the_request() -> None:
    for seed in (0, 7, 2**63 - 1):
        body = ChatRequest.model_validate(chat_body(seed=seed, n=16))
        seeds = [body.sampling_params(choice, None, (), 0).seed for choice in range(16)]
        assert seeds[0] == seed % 2**63
        assert len(set(seeds)) == 16
        assert all(one is not None and 0 <= one < 2**63 for one in seeds)
    assert ChatRequest.model_validate(chat_body(n=2)).sampling_params(1, None, (), 0).seed is None


def test_the_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine(completion_ids("x"))
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "max_tokens": 5, "seed": 11, "stop_token_ids": [5, 6], "logprobs": 4}
    assert post(engine, COMPLETIONS, completion_body(**fields)).status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.seed) == (0.5, 0.25, 3, 5, 11)
    assert sampling.top_logprobs == 4
    assert set(sampling.stop_token_ids) == {5, 6, 257, 258}


def test_left_out_fields_are_the_defaults_of_the_openai_api() -> None:
    for path, body, limit in ((CHAT, {"messages": HELLO}, None), (COMPLETIONS, {"prompt": "Hello."}, 16)):
        engine = FakeEngine(completion_ids("x"))
        assert post(engine, path, {"model": NAME, **body}).status_code == 200
        sampling = engine.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, None)
        assert (sampling.max_tokens, sampling.top_logprobs) == (limit, 0)


def test_ends_that_the_model_cannot_sample_are_not_asked_for() -> None:
    engine = FakeEngine(max_length=10)
    engine.vocab_size = TOKENIZER.eos_id + 1
    assert post(engine, COMPLETIONS, completion_body(prompt=[1])).status_code == 200
    assert engine.requests[0].sampling.stop_token_ids == (TOKENIZER.eos_id,)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ignore_eos_leaves_only_the_stop_tokens_of_the_request(path: str) -> None:
    engine = FakeEngine()
    body = (chat_body if path == CHAT else completion_body)(ignore_eos=True, stop_token_ids=[9])
    assert post(engine, path, body).status_code == 200
    assert engine.requests[0].sampling.stop_token_ids == (9,)


def test_max_completion_tokens_is_max_tokens_by_another_name() -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello."})):
        engine = FakeEngine()
        assert post(engine, path, {"model": NAME, **body, "max_completion_tokens": 3}).json()["usage"]["completion_tokens"] == 3


# The conversation.

CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "first", "arguments": '{"x": 1}'}},
    {"id": "call_b", "type": "function", "function": {"name": "second", "arguments": "not JSON"}},
]


def messages(*bodies: dict[str, object]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(body) for body in bodies]


def result(call_id: str | None, **fields: object) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"result of {call_id}", **fields}


def test_every_role_becomes_its_message() -> None:
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    said = conversation(
        messages(
            {"role": "system", "content": "Be brief.", "name": "s"},
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": parts, "name": "Eva"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": CALLS, "refusal": None, "annotations": []},
            result("call_b"),
            result("call_a", name="first"),
            {"role": "assistant", "content": "Done."},
        )
    )
    assert said == [
        SystemMessage("Be brief.", "s"),
        SystemMessage("Be kind."),
        UserMessage("two parts", "Eva"),
        AssistantMessage("", "Hm.", (ToolCall("first", '{"x": 1}'), ToolCall("second", "not JSON"))),
        ToolMessage("first", "result of call_a", 1),
        ToolMessage("second", "result of call_b", 2),
        AssistantMessage("Done."),
    ]


def test_ids_count_within_the_last_assistant_message_alone() -> None:
    turn = [{"role": "assistant", "content": None, "tool_calls": CALLS[:1]}, result("call_a")]
    assert len(conversation(messages(*HELLO, *turn, *turn, *HELLO))) == 6


ASKED: list[dict[str, object]] = [*HELLO, {"role": "assistant", "content": None, "tool_calls": CALLS}]


@pytest.mark.parametrize(
    ("bodies", "param", "part"),
    [
        ([*ASKED, result("call_a"), result("call_c")], "messages[3].tool_call_id", "'call_c'"),
        ([*ASKED, result("call_a"), result(None)], "messages[3].tool_call_id", "missing"),
        ([*ASKED, result("call_a"), result("call_a")], "messages[3].tool_call_id", "before"),
        ([*ASKED, result("call_a")], "messages[1].tool_calls[1].id", "'call_b'"),
        ([*ASKED, result("call_b"), *HELLO], "messages[1].tool_calls[0].id", "'call_a'"),
        (ASKED, "messages[1].tool_calls[0].id", "'call_a'"),
        ([*ASKED, result("call_a"), result("call_b"), *HELLO, result("call_a")], "messages[5].tool_call_id", "'call_a'"),
        ([result("call_a")], "messages[0].tool_call_id", "'call_a'"),
        ([*ASKED, result("call_a", name="second"), result("call_b")], "messages[2].name", "'first'"),
        ([*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALLS[0]] * 2}], "messages[1].tool_calls[1].id", "'call_a'"),
    ],
)
def test_a_tool_result_that_is_not_of_its_call_is_refused_where_it_stands(bodies: list[dict[str, object]], param: str, part: str) -> None:
    error = refusal(CHAT, chat_body(messages=bodies))
    assert error["param"] == param
    assert part in error["message"]
