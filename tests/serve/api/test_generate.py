"""POST /inference/v1/generate: what it accepts, what it answers, and that it lets go of what nobody waits for."""

import asyncio
import base64
import io
import json
import logging
import math
import socket
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from perilune.errors import UserError
from perilune.model.tokenizer import ByteTokenizer
from perilune.serve.api.generate_types import decode_experts, encode_experts
from perilune.serve.generation import EngineBusyError, GenerationError, SampledToken
from tests.serve.scripted_engine import HELD, LENGTH, PATIENCE, VOCABULARY, ScriptedEngine, next_of, scripted_app, served, token_for

ENDS = (ByteTokenizer().end_of_message_id, ByteTokenizer().eos_id)
BODY: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "seed": 1}}


def post(engine: ScriptedEngine, content: object) -> httpx.Response:
    """The app's answer, without a network; `content`: bytes, or what becomes JSON."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(scripted_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            return await client.post("/inference/v1/generate", content=body, headers={"Content-Type": "application/json"})

    return asyncio.run(ask())


def sampled_with(**sampling: object) -> dict[str, Any]:
    return BODY | {"sampling_params": {"max_tokens": 4, "seed": 1} | sampling}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert done == "[DONE]"
    return [json.loads(text) for text in data]


def error(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()["error"]
    return body


def wanted(engine: ScriptedEngine, count: int) -> list[SampledToken]:
    return [token_for(engine.requests[-1], place, 0) for place in range(count)]


def test_an_answer_has_vllms_shape() -> None:
    engine = ScriptedEngine()
    response = post(engine, sampled_with(logprobs=2) | {"request_id": "mine", "model": "scripted"})
    tokens = wanted(engine, 4)
    assert response.status_code == 200
    assert response.json() == {
        "request_id": "mine",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "token_ids": [token.id for token in tokens],
                "finish_reason": "length",
                "logprobs": {
                    "content": [
                        {
                            "token": f"token_id:{token.id}",
                            "logprob": token.logprob,
                            "bytes": None,
                            "top_logprobs": [{"token": f"token_id:{id}", "logprob": value, "bytes": None} for id, value in token.top],
                        }
                        for token in tokens
                    ]
                },
                "routed_experts": None,
                "weight_versions": [0, 0, 0, 0],
            }
        ],
        "prompt_token_ids": [5, 6, 7],
        "weight_version": 0,
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_a_stream_is_the_same_answer_in_pieces() -> None:
    engine = ScriptedEngine()
    request = sampled_with(logprobs=1) | {"return_routed_experts": True}
    whole = post(engine, request).json()["choices"][0]
    *chunks, usage = events(post(engine, request | {"stream": True, "stream_options": {"include_usage": True}}))
    choices = [chunk["choices"][0] for chunk in chunks]
    for field in ("token_ids", "weight_versions"):
        assert [item for choice in choices for item in choice[field]] == whole[field]
    assert [item for choice in choices for item in choice["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    assert [choice["routed_experts"] for choice in choices] == [None] * 4 + [whole["routed_experts"]]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert len({chunk["request_id"] for chunk in (*chunks, usage)}) == 1


def test_without_include_usage_a_stream_ends_with_the_finish() -> None:
    chunks = events(post(ScriptedEngine(), BODY | {"stream": True}))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)


def test_the_last_tokens_weights_are_the_answers_version() -> None:
    engine = ScriptedEngine()
    engine.script = lambda request, place, version: SampledToken(place, -1.0, 10 + place)
    answer = post(engine, BODY).json()
    assert answer["choices"][0]["weight_versions"] == [10, 11, 12, 13]
    assert answer["weight_version"] == 13


def test_every_request_gets_an_id_of_its_own() -> None:
    engine = ScriptedEngine()
    ids = [post(engine, BODY).json()["request_id"] for _ in range(2)]
    assert ids == [request.request_id for request in engine.requests]
    assert len(set(ids)) == 2


def test_sampling_fields_reach_the_engine_as_they_are() -> None:
    engine = ScriptedEngine()
    post(engine, sampled_with(temperature=0.3, top_p=0.1, top_k=9, stop_token_ids=[8, 9, 8], logprobs=3, seed=2**63 - 1))
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.3, 0.1, 9, 2**63 - 1)
    assert (sampling.max_tokens, sampling.top_logprobs, sampling.stop_token_ids) == (4, 3, (8, 9, *ENDS))


def test_ignore_eos_leaves_only_the_stop_token_ids() -> None:
    engine = ScriptedEngine()
    post(engine, sampled_with(ignore_eos=True, stop_token_ids=[8]))
    assert engine.requests[0].sampling.stop_token_ids == (8,)


def test_an_end_token_that_the_model_cannot_sample_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serve.scripted_engine.VOCABULARY", max(ENDS))
    engine = ScriptedEngine()
    assert post(engine, BODY).status_code == 200
    assert engine.requests[0].sampling.stop_token_ids == (min(ENDS),)


@pytest.mark.parametrize("sampling", [None, {}, {"max_tokens": None}])
def test_without_max_tokens_an_answer_may_fill_the_engines_longest_sequence(sampling: object) -> None:
    engine = ScriptedEngine()
    engine.script = lambda request, place, version: SampledToken(1, -1.0, version)
    answer = post(engine, {"token_ids": [5, 6, 7], "sampling_params": sampling}).json()
    assert engine.requests[0].sampling.max_tokens is None
    assert len(answer["choices"][0]["token_ids"]) == LENGTH - 3


@pytest.mark.parametrize("top_k", [-1, 0, None])
def test_no_top_k_has_three_spellings(top_k: int | None) -> None:
    engine = ScriptedEngine()
    assert post(engine, sampled_with(top_k=top_k)).status_code == 200
    assert engine.requests[0].sampling.top_k == 0


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    engine = ScriptedEngine()
    neutral = {
        "n": 1, "best_of": 1, "min_p": 0.0, "min_tokens": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "skip_special_tokens": False, "spaces_between_special_tokens": True, "detokenize": False, "include_stop_str_in_output": False,
        "extra_args": {}, "logit_bias": {}, "bad_words": [], "stop": [], "prompt_logprobs": None, "seed": None, "temperature": None,
        "structured_outputs": None, "whatever": None,
    }  # fmt: skip
    outer = {
        "cache_salt": "version 7", "priority": 0, "stream_options": None, "return_token_ids": True, "features": None, "stream": False,
        "kv_transfer_params": None, "model": None, "request_id": None, "return_routed_experts": None,
    }  # fmt: skip
    response = post(engine, BODY | outer | {"sampling_params": neutral | {"max_tokens": 2, "skip_special_tokens": True}})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("priority", 1), ("features", {}), ("messages", []), ("sampling_params.n", 2), ("sampling_params.min_p", 0.1),
        ("sampling_params.n", True), ("sampling_params.repetition_penalty", 1.1), ("sampling_params.presence_penalty", 1),
        ("sampling_params.frequency_penalty", math.nan), ("sampling_params.min_tokens", 1), ("sampling_params.logit_bias", {"5": 1}),
        ("sampling_params.prompt_logprobs", 1), ("sampling_params.extra_args", {"a": 1}), ("sampling_params.bad_words", ["x"]),
        ("sampling_params.allowed_token_ids", [1]), ("sampling_params.max_token", 5), ("stream_options.chunks", 1),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_honoured_is_refused_by_name(where: str, value: object) -> None:
    outer, _, inner = where.partition(".")
    engine = ScriptedEngine()
    response = post(engine, BODY | {"stream": True} | ({outer: {inner: value}} if inner else {outer: value}))
    assert response.status_code == 400
    assert error(response)["message"] == f"{where} is not supported: leave it out"
    assert error(response)["param"] == where
    assert engine.requests == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling_params": {"stop": ["</s>"]}}, ["sampling_params.stop", "stop_token_ids"]),
        ({"sampling_params": {"stop": "</s>"}}, ["sampling_params.stop", "stop_token_ids"]),
        ({"token_ids": []}, ["token_ids"]),
        ({"token_ids": None}, ["token_ids", "missing"]),
        ({"token_ids": "abc"}, ["token_ids"]),
        ({"token_ids": [1, True]}, ["token_ids[1]"]),
        ({"token_ids": [1, 2.0]}, ["token_ids[1]"]),
        ({"token_ids": [1, "2"]}, ["token_ids[1]"]),
        ({"token_ids": [1, None]}, ["token_ids[1]"]),
        ({"token_ids": [1, -1]}, ["token_ids", "-1"]),
        ({"token_ids": [1, VOCABULARY]}, ["token_ids", "300", "299"]),
        ({"token_ids": [1, 2**64]}, ["token_ids", str(2**64)]),
        ({"token_ids": [1, 10**1000]}, ["token_ids", "1000"]),
        ({"token_ids": [1] * LENGTH}, ["64"]),
        ({"sampling_params": {"stop_token_ids": [2**64]}}, ["sampling_params.stop_token_ids", str(2**64)]),
        ({"sampling_params": {"stop_token_ids": [-1]}}, ["sampling_params.stop_token_ids", "-1"]),
        ({"sampling_params": {"max_tokens": 0}}, ["sampling_params.max_tokens"]),
        ({"sampling_params": {"max_tokens": LENGTH}}, ["max_tokens"]),
        ({"sampling_params": {"max_tokens": 2**70}}, ["sampling_params.max_tokens"]),
        ({"sampling_params": {"max_tokens": "4"}}, ["sampling_params.max_tokens"]),
        ({"sampling_params": {"temperature": -0.1}}, ["temperature", "-0.1"]),
        ({"sampling_params": {"temperature": math.inf}}, ["temperature", "inf"]),
        ({"sampling_params": {"temperature": math.nan}}, ["temperature", "nan"]),
        ({"sampling_params": {"top_p": 0}}, ["top_p"]),
        ({"sampling_params": {"top_p": 1.5}}, ["top_p", "1.5"]),
        ({"sampling_params": {"top_k": -2}}, ["sampling_params.top_k"]),
        ({"sampling_params": {"seed": -1}}, ["sampling_params.seed"]),
        ({"sampling_params": {"seed": 2**63}}, ["sampling_params.seed"]),
        ({"sampling_params": {"logprobs": 21}}, ["sampling_params.logprobs", "20"]),
        ({"sampling_params": {"logprobs": -1}}, ["sampling_params.logprobs"]),
        ({"sampling_params": []}, ["sampling_params"]),
        ({"request_id": ""}, ["request_id"]),
        ({"request_id": "a" * 201}, ["request_id"]),
        ({"request_id": "line\nbreak"}, ["request_id"]),
        ({"request_id": "\ud800"}, ["request_id"]),
        ({"\ud800": 1}, ["not supported"]),
        ({"stream": 1}, ["stream"]),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], words: list[str]) -> None:
    engine = ScriptedEngine()
    for stream in ({}, {"stream": True}):
        response = post(engine, BODY | stream | change)
        assert response.status_code == 400
        assert all(word in error(response)["message"] for word in words), response.text
    assert engine.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"token_ids": [' + b"9" * 10_000 + b"]}"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    response = post(ScriptedEngine(), body)
    assert response.status_code == 400
    assert error(response)["message"]


def test_another_models_name_is_not_found() -> None:
    response = post(ScriptedEngine(), BODY | {"model": "\ud800"})
    assert response.status_code == 404
    assert error(response)["code"] == "model_not_found"
    assert error(response)["param"] == "model"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [(UserError("no"), 400), (EngineBusyError("later"), 503), (GenerationError("broken"), 500), (RuntimeError("a bug"), 500)],
)
def test_an_early_failure_has_its_own_status(failure: Exception, status: int, stream: bool) -> None:
    engine = ScriptedEngine()
    engine.fail_at = {0: failure}
    response = post(engine, BODY | {"stream": stream})
    assert response.status_code == status
    assert error(response)["message"]
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)


def test_a_late_failure_ends_the_stream_with_an_error_and_no_finish() -> None:
    engine = ScriptedEngine()
    engine.fail_at = {2: GenerationError("the logits are not finite")}
    *chunks, last = events(post(engine, BODY | {"stream": True}))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]
    assert last["error"]["message"] == "the logits are not finite"


def test_an_engine_that_leaves_off_early_is_an_error() -> None:
    engine = ScriptedEngine()
    whole = engine.stream

    async def cut(request):  # type: ignore[no-untyped-def]
        async for event in whole(request):
            if not isinstance(event, SampledToken):
                return
            yield event

    engine.stream = cut  # type: ignore[method-assign]
    assert post(engine, BODY).status_code == 500
    assert "error" in events(post(engine, BODY | {"stream": True}))[-1]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("in_top", [False, True])
def test_a_logprob_that_is_no_number_is_an_error_and_never_json(wrong: float, in_top: bool) -> None:
    engine = ScriptedEngine()
    token = SampledToken(9, -1.0, 4, ((8, wrong),)) if in_top else SampledToken(9, wrong, 4)
    engine.script = lambda request, place, version: token
    for stream in (False, True):
        response = post(engine, BODY | {"stream": stream})
        assert response.status_code == 500
        assert f"token {8 if in_top else 9} the log-probability {wrong} with weights of version 4" in error(response)["message"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_floats_are_written_so_that_they_read_back_exactly(logprobs: list[float]) -> None:
    engine = ScriptedEngine()
    engine.script = lambda request, place, version: SampledToken(1, logprobs[place], version)
    answer = post(engine, sampled_with(max_tokens=len(logprobs), ignore_eos=True)).json()
    read = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert [value.hex() for value in map(float, read)] == [value.hex() for value in logprobs]


experts_arrays = arrays.arrays(
    np.int64, arrays.array_shapes(min_dims=3, max_dims=3, min_side=0, max_side=6), elements=st.integers(0, 65535) | st.integers(0, 255)
)


@settings(deadline=None)
@given(experts_arrays)
def test_experts_come_back_as_they_were(ids: np.ndarray) -> None:
    text = encode_experts(torch.from_numpy(ids))
    assert np.array_equal(decode_experts(text).numpy(), ids)
    assert decode_experts(text).dtype == torch.int64
    stored = np.load(io.BytesIO(base64.b64decode(text)))  # as any other reader of vLLM's answers does
    assert stored.dtype == (np.uint8 if ids.max(initial=0) < 256 else np.uint16)


@pytest.mark.parametrize(("highest", "dtype"), [(255, np.uint8), (256, np.uint16), (65535, np.uint16)])
def test_experts_are_written_in_the_narrowest_type_that_holds_them(highest: int, dtype: type) -> None:
    text = encode_experts(torch.tensor([[[0, highest]]]))
    assert np.load(io.BytesIO(base64.b64decode(text))).dtype == dtype
    assert decode_experts(text).tolist() == [[[0, highest]]]


@pytest.mark.parametrize("ids", [[[[65536]]], [[[-1]]]])
def test_an_expert_that_the_format_cannot_name_is_refused(ids: list[list[list[int]]]) -> None:
    with pytest.raises(ValueError, match="0 to 65535"):
        encode_experts(torch.tensor(ids))


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@settings(deadline=None)
@given(st.binary(max_size=200) | st.integers(0, 140).map(lambda cut: npy(np.zeros((2, 3, 4), np.uint8))[:cut]))
def test_what_is_no_array_of_experts_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_experts(base64.b64encode(data).decode())


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3)), np.zeros((2, 3), np.uint8), np.zeros((1, 1, 1), np.float32), np.array([[[None]]], dtype=object)]
)
def test_other_arrays_are_no_experts(array: np.ndarray) -> None:
    with pytest.raises(ValueError):
        decode_experts(base64.b64encode(npy(array)).decode())


def test_an_abort_answers_with_the_tokens_so_far() -> None:
    engine = ScriptedEngine()
    with served(scripted_app(engine)) as address:

        async def scenario() -> None:
            async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as client:
                body = {"token_ids": [HELD], "request_id": "long", "return_routed_experts": True}
                answer = asyncio.create_task(client.post("/inference/v1/generate", json=body))
                await next_of(engine.arrived)
                again = await client.post("/inference/v1/generate", json=body)
                assert again.status_code == 400
                assert "long" in error(again)["message"]
                await client.post("/abort_requests", json={"request_ids": ["long"]})
                choice = (await answer).json()["choices"][0]
                assert choice["finish_reason"] == "abort"
                assert len(choice["token_ids"]) == 3
                assert decode_experts(choice["routed_experts"]).shape == (3, 2, 3)

        asyncio.run(scenario())


def test_an_abort_before_the_first_token_is_an_answer_too() -> None:
    engine = ScriptedEngine()
    engine.version = 6
    with served(scripted_app(engine)) as address:

        async def scenario() -> None:
            async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as client:
                engine.hold_at = 0
                answer = asyncio.create_task(client.post("/inference/v1/generate", json={"token_ids": [HELD], "request_id": "long"}))
                await next_of(engine.held)
                await client.post("/abort_requests", json={"request_ids": ["long"]})
                body = (await answer).json()
                assert body["choices"][0]["token_ids"] == []
                assert body["choices"][0]["finish_reason"] == "abort"
                assert body["weight_version"] == 6

        asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 3])
def test_hanging_up_ends_the_request(stream: bool, hold_at: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    engine.hold_at = hold_at
    body = json.dumps({"token_ids": [HELD], "request_id": "left", "stream": stream}).encode()
    head = b"POST /inference/v1/generate HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    with caplog.at_level(logging.WARNING), served(scripted_app(engine)) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + body)
            assert engine.held.get(timeout=PATIENCE) == "left"
            if stream and hold_at:
                assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert engine.ended.get(timeout=PATIENCE) == "left"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
