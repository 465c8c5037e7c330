import asyncio
import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

import perilune
from perilune.errors import UserError
from perilune.model.chat import AssistantMessage
from perilune.serve.api.app import create_app
from perilune.serve.api.errors import AnswerErrors
from perilune.serve.api.gate import MAX_BODY_BYTES
from perilune.serve.generation import EngineBusyError, EngineInfo, GenerationError
from tests.serve.api.fake_engine import NAME, TOKENIZER, FakeEngine, app_of, ask, completion_ids, message_ids, post, stream

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES = {CHAT: {"model": NAME, "messages": [{"role": "user", "content": "Hi."}]}, COMPLETIONS: {"model": NAME, "prompt": "Hi."}}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{NAME}"),
    ("POST", CHAT),
    ("POST", COMPLETIONS),
    ("POST", "/inference/v1/generate"),
    ("POST", "/abort_requests"),
    ("POST", "/update_weights?version=1"),
    ("GET", "/get_weight_version"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/path"),
]


def get(path: str, engine: FakeEngine | None = None, **headers: str) -> httpx.Response:
    return ask(app_of(engine or FakeEngine()), lambda client: client.get(path, headers=headers))


def error_of(answer: httpx.Response) -> dict[str, object]:
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, object] = body["error"]
    return error


# What is served.


def test_the_model_is_listed_with_its_length_and_weight_version() -> None:
    app = app_of(FakeEngine())
    entry = ask(app, lambda client: client.get(f"/v1/models/{NAME}")).json()
    assert ask(app, lambda client: client.get("/v1/models")).json() == {"object": "list", "data": [entry]}
    created = entry.pop("created")
    assert created > 1_700_000_000
    assert entry == {"id": NAME, "object": "model", "owned_by": "perilune", "max_model_len": 4096, "weight_version": 7}


class OddlyNamed(FakeEngine):
    async def info(self) -> EngineInfo:
        return EngineInfo("org/model", 10, TOKENIZER.vocab_size, 0)


def test_a_models_name_may_have_slashes() -> None:
    assert get("/v1/models/org/model", OddlyNamed()).json()["id"] == "org/model"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models/sun"])
def test_a_model_that_is_not_served_is_not_found_and_the_one_served_is_named(path: str) -> None:
    answer = get(path) if path not in BODIES else post(FakeEngine(), path, {**BODIES[path], "model": "sun"})
    assert answer.status_code == 404
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert NAME in str(error["message"]) and "sun" in str(error["message"])


def test_the_version_is_the_packages() -> None:
    assert get("/version").json() == {"version": perilune.__version__}


class Dead(FakeEngine):
    async def info(self) -> EngineInfo:
        raise GenerationError("the engine is closed")


class Deaf(FakeEngine):
    async def info(self) -> EngineInfo:
        return await asyncio.get_running_loop().create_future()


def test_health_is_whether_the_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get("/health").status_code == 200
    monkeypatch.setattr("perilune.serve.api.models._PATIENCE", 0.01)
    for engine in (Dead(), Deaf()):
        answer = get("/health", engine)
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "engine_unavailable"


# The key.


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Bearer ", "Basic key🗝", "key🗝", "Bearer key", "Bearer key🗝x"])
def test_with_a_key_nothing_is_served_without_it(given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode()}

    async def answers(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.request(method, path, headers=headers, content=b"{}") for method, path in ROUTES]

    for answer in ask(app_of(FakeEngine(), "key🗝"), answers):
        assert answer.status_code == 401
        assert error_of(answer)["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_key_everything_is_served(scheme: str) -> None:
    headers = {"Authorization": f"{scheme} key🗝".encode()}
    app = app_of(FakeEngine(completion_ids("a")), "key🗝")
    assert ask(app, lambda client: client.get("/v1/models", headers=headers)).status_code == 200
    assert ask(app, lambda client: client.post(COMPLETIONS, headers=headers, json=BODIES[COMPLETIONS])).status_code == 200


def test_health_needs_no_key() -> None:
    assert ask(app_of(FakeEngine(), "key"), lambda client: client.get("/health")).status_code == 200


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="API key is empty"):
        app_of(FakeEngine(), key)


# Bodies.


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain;application/json", "application/x-www-form-urlencoded", "multipart/form-data", None, ""]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/inference/v1/generate", "/abort_requests"])
def test_what_a_web_page_can_post_anywhere_reaches_no_handler(path: str, kind: str | None) -> None:
    engine = FakeEngine(completion_ids("a"))
    content = json.dumps(BODIES.get(path, {"token_ids": [1], "sampling_params": {}}))
    headers = {} if kind is None else {"Content-Type": kind}
    answer = ask(app_of(engine), lambda client: client.post(path, content=content, headers=headers))
    assert answer.status_code == 415
    assert "application/json" in str(error_of(answer)["message"])
    assert engine.requests == []


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_json_is_taken_however_it_is_declared(kind: str) -> None:
    content = json.dumps(BODIES[COMPLETIONS])
    answer = ask(app_of(FakeEngine()), lambda client: client.post(COMPLETIONS, content=content, headers={"Content-Type": kind}))
    assert answer.status_code == 200


def post_raw(content: bytes | AsyncIterator[bytes], path: str = CHAT) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return ask(app_of(FakeEngine()), lambda client: client.post(path, content=content, headers=headers))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model": 1' + b"0" * 5000 + b"}",
        b'{"model": "moon", "prompt": 1e999}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_that_is_no_request_is_refused(path: str, content: bytes) -> None:
    answer = post_raw(content, path)
    assert answer.status_code == 400
    assert len(answer.content) < 2000
    error_of(answer)


def test_a_schema_nested_too_deep_for_the_model_is_refused() -> None:
    schema = '{"a":' * 950 + "{}" + "}" * 950
    tools = '[{"type": "function", "function": {"name": "f", "parameters": ' + schema + "}}]"
    content = json.dumps(BODIES[CHAT])[:-1] + f', "tools": {tools}}}'
    assert post_raw(content.encode()).status_code in (200, 400)


def test_a_body_larger_than_the_limit_is_refused_declared_or_not() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    for content in (b" " * (MAX_BODY_BYTES + 1), pieces()):
        answer = post_raw(content)
        assert answer.status_code == 413
        assert str(MAX_BODY_BYTES) in str(error_of(answer)["message"])


def test_of_a_body_declared_too_large_nothing_is_read() -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(MAX_BODY_BYTES + 1).encode())]
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "headers": headers}
    asyncio.run(app_of(FakeEngine())(scope, receive, send))
    assert sent[0]["status"] == 413


def test_an_error_quotes_no_more_than_a_little_of_what_was_sent() -> None:
    answer = post(FakeEngine(), CHAT, {**BODIES[CHAT], "model": "x" * 100_000})
    assert answer.status_code == 404
    assert len(answer.content) < 2000


def test_an_error_may_quote_what_utf8_cannot_carry() -> None:
    answer = post(FakeEngine(), CHAT, {**BODIES[CHAT], "model": "\ud800"})
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"


def test_paths_and_methods_that_do_not_exist_are_answered_in_the_same_form() -> None:
    assert error_of(get("/v1/nothing"))["type"] == "not_found_error"
    answer = get(CHAT)
    assert answer.status_code == 405
    error_of(answer)


# Failures.

FAILURES = [
    (UserError("the prompt is odd"), 400, None, "the prompt is odd"),
    (EngineBusyError("too many are waiting"), 503, "engine_busy", "too many are waiting"),
    (GenerationError("the logits are not finite"), 500, "generation_failed", "the logits are not finite"),
    (ZeroDivisionError("secret"), 500, "internal_error", "its log says why"),
]


@pytest.mark.parametrize(("failure", "status", "code", "message"), FAILURES)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_failure_before_the_first_token_is_answered_with_its_status(
    path: str, is_streamed: bool, failure: Exception, status: int, code: str | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = post(FakeEngine(failure=failure), path, {**BODIES[path], "stream": is_streamed, "n": 3})
    assert answer.status_code == status
    error = error_of(answer)
    assert error["code"] == code and message in str(error["message"])
    assert "Traceback" not in answer.text and "secret" not in answer.text
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.exc_info[1] for record in logged if record.exc_info] == ([failure] if status == 500 else [])


def test_a_failure_in_the_middle_of_an_answer_is_left_to_the_server() -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(AnswerErrors(breaks)({"type": "http"}, send, send))  # type: ignore[arg-type]
    assert len(sent) == 1


class FailsLate(FakeEngine):
    def _top(self, token_id: int, number: int) -> tuple[tuple[int, float], ...]:
        if token_id == ord("!"):
            raise self.late_failure
        return ()

    late_failure: Exception = GenerationError("the engine broke")


@pytest.mark.parametrize(("failure", "code"), [(GenerationError("it broke"), "generation_failed"), (KeyError("secret"), "internal_error")])
def test_a_failure_later_ends_the_stream_with_an_error_and_the_other_choices_with_it(failure: Exception, code: str) -> None:
    engine = FailsLate(message_ids(AssistantMessage("Hi! there")), [ord("a")] * 1000)
    engine.late_failure = failure
    *events, last = stream(engine, CHAT, {**BODIES[CHAT], "n": 2})
    assert last["error"]["code"] == code and "secret" not in json.dumps(last)
    assert all("error" not in event for event in events)
    assert any(event["choices"][0]["delta"].get("content") == "H" for event in events)
    assert engine.requests[1].request_id in engine.left


class LeavesOff(FakeEngine):
    async def stream(self, request):  # type: ignore[no-untyped-def]
        async for event in super().stream(request):
            yield event
            return


def test_an_engine_that_leaves_off_is_an_error_not_a_short_answer() -> None:
    answer = post(LeavesOff(), COMPLETIONS, BODIES[COMPLETIONS])
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "generation_failed"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_that_the_operator_ends_early_is_marked_and_whole_as_far_as_it_goes(path: str) -> None:
    engine = FakeEngine(message_ids(AssistantMessage("Hello there"), thinking=False), pause_at=5)
    body = {**BODIES[path], **({"reasoning_effort": "none"} if path == CHAT else {})}

    async def run(client: httpx.AsyncClient) -> httpx.Response:
        asked = asyncio.create_task(client.post(path, json=body))
        await engine.paused.wait()
        [request] = engine.requests
        answer = await client.post("/abort_requests", json={"request_ids": [request.request_id]})
        assert answer.status_code == 200
        return await asked

    choice = ask(app_of(engine), run).json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "Hello"
    assert engine.left == []


def test_a_vocabulary_without_a_chat_format_is_refused_at_the_start() -> None:
    with pytest.raises(UserError, match="chat format"):
        create_app(FakeEngine(), Formless())


class Formless(type(TOKENIZER)):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.special_names = ("[BOS]",)
