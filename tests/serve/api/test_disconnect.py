"""Whoever hangs up takes his request along: real sockets, a real server."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.types import Message

from perilune.model.chat import AssistantMessage
from perilune.serve.api.streaming import EventStream
from perilune.serve.generation import GenerationRequest, SampledToken
from tests.serve.api.fake_engine import NAME, FakeEngine, app_of, message_ids, post, text_ids

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES = {CHAT: {"model": NAME, "messages": [{"role": "user", "content": "Hi."}]}, COMPLETIONS: {"model": NAME, "prompt": ["a", "b"]}}
ANSWERS = {CHAT: message_ids(AssistantMessage("", "Let me think.")), COMPLETIONS: text_ids("Let me think.")}
ALL = [(path, is_streamed) for path in (CHAT, COMPLETIONS) for is_streamed in (False, True)]
PATIENCE = 30.0


@asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[tuple[str, int]]:
    """A server in this event loop."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app_of(engine), log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield listening.getsockname()[:2]
        finally:
            server.should_exit = True
            await running


async def send(address: tuple[str, int], path: str, body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    return reader, writer


def run(engine: FakeEngine, use: Callable[[tuple[str, int]], Awaitable[None]]) -> None:
    async def test() -> None:
        async with serving(engine) as address:
            await asyncio.wait_for(use(address), PATIENCE)

    asyncio.run(test())


@pytest.mark.parametrize(("path", "is_streamed"), ALL)
@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_request_that_waits_for_its_first_token_is_aborted_when_its_client_is_gone(
    path: str, is_streamed: bool, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(ANSWERS[path], pause_at=0)

    async def use(address: tuple[str, int]) -> None:
        _, writer = await send(address, path, {**BODIES[path], "stream": is_streamed, "n": 2})
        await engine.paused.wait()
        assert engine.left == []
        if how == "resets":
            writer.transport.abort()
        writer.close()
        await engine.all_left.wait()
        assert sorted(engine.left) == sorted(request.request_id for request in engine.requests)
        assert len(engine.requests) == (2 if path == CHAT else 4)

    run(engine, use)
    assert caplog.records == []  # someone who leaves is no error


@pytest.mark.parametrize(("path", "is_streamed"), ALL)
def test_a_request_that_runs_is_aborted_when_its_client_is_gone(path: str, is_streamed: bool) -> None:
    engine = FakeEngine(ANSWERS[path], pause_at=8)

    async def use(address: tuple[str, int]) -> None:
        reader, writer = await send(address, path, {**BODIES[path], "stream": is_streamed})
        await engine.paused.wait()
        if is_streamed:
            await reader.readuntil(b'"m"')
        writer.close()
        await engine.all_left.wait()

    run(engine, use)


def test_a_client_that_half_reads_and_goes_while_the_server_writes_is_let_go() -> None:
    engine = FakeEngine(max_length=10**9)  # an answer without end, faster than anyone reads it

    async def use(address: tuple[str, int]) -> None:
        body = {**BODIES[COMPLETIONS], "stream": True, "max_tokens": 10**8, "logprobs": 5}
        reader, writer = await send(address, COMPLETIONS, body)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await engine.all_left.wait()

    run(engine, use)


@pytest.mark.parametrize(("path", "is_streamed"), ALL)
def test_a_client_that_stays_has_its_whole_answer_and_nothing_is_aborted(path: str, is_streamed: bool) -> None:
    engine = FakeEngine(ANSWERS[path], pause_at=8)

    async def use(address: tuple[str, int]) -> None:
        reader, writer = await send(address, path, {**BODIES[path], "max_tokens": 14, "stream": is_streamed})
        await engine.paused.wait()
        engine.go_on.set()
        await reader.readuntil(b"[DONE]" if is_streamed else b'"finish_reason":"length"')
        # The connection serves the next request: the first left nothing behind on it.
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'"version"')
        writer.close()
        assert engine.left == []

    run(engine, use)


class Watched:
    """An iterator that is no generator: nothing but a call of `aclose` closes it."""

    def __init__(self) -> None:
        self.is_closed = False

    def __aiter__(self) -> "Watched":
        return self

    async def __anext__(self) -> SampledToken:
        return SampledToken(ord("a"), 0.0, 0)

    async def aclose(self) -> None:
        self.is_closed = True


def test_what_an_engine_streams_is_closed_after_a_stop_string() -> None:
    class Engine(FakeEngine):
        events = Watched()

        def stream(self, request: GenerationRequest) -> Watched:  # type: ignore[override]
            return self.events

    answer = post(Engine(), COMPLETIONS, {"model": NAME, "prompt": "x", "stop": "aa"})
    assert (answer.json()["choices"][0]["text"], Engine.events.is_closed) == ("", True)


def test_a_stream_whose_client_is_gone_before_it_begins_is_closed() -> None:
    events = Watched()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await asyncio.get_running_loop().create_future()

    asyncio.run(EventStream(events)({"type": "http"}, receive, send))  # type: ignore[arg-type]
    assert events.is_closed
