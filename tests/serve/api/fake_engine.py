"""An engine that says what a test tells it to, and the tools to say it in: everything of the HTTP tests that is not HTTP."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from torch import Tensor

from perilune.model.chat import AssistantMessage, generation_prefix, render
from perilune.model.tokenizer import ByteTokenizer, Tokenizer
from perilune.serve.api.app import create_app
from perilune.serve.client.collect import collect
from perilune.serve.generation import EngineInfo, Finished, Generation, GenerationRequest, SampledToken

T = TypeVar("T")
NAME = "moon"
TOKENIZER = ByteTokenizer()


def logprob(token_id: int) -> float:
    """The fake engine's, one per id."""
    return -(1 + token_id) / 1024


class FakeEngine:
    """An EngineClient that answers request number k with the ids `answers[k]` (the last of them for all later requests), then goes on
    with "." until something ends it.

    A request waits before token number `pause_at` until `go_on` is set or it is aborted. `failure` is raised before the first token.
    """

    def __init__(
        self, *answers: Sequence[int], max_length: int = 4096, pause_at: int | None = None, failure: Exception | None = None
    ) -> None:
        self._answers = answers or ((),)
        self._max_length, self._pause_at, self.failure = max_length, pause_at, failure
        self.requests: list[GenerationRequest] = []
        self.left: list[str] = []
        """Ids of requests whose streams were closed before they were finished."""
        self.vocab_size = TOKENIZER.vocab_size
        self.is_closed = False
        self.go_on = asyncio.Event()
        self.paused = asyncio.Event()
        self.all_left = asyncio.Event()
        """Every request there was has been left."""
        self._aborted: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def release(self) -> None:
        """Let paused requests go on; from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.go_on.set)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampledToken | Finished]:
        answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(request)
        self._loop = asyncio.get_running_loop()
        self.all_left.clear()
        aborted = self._aborted[request.request_id] = asyncio.Event()
        is_finished = False
        try:
            if self.failure is not None:
                is_finished = True
                raise self.failure
            limit = self._max_length - len(request.prompt_ids)
            limit = min(limit, request.sampling.max_tokens or limit)
            for place in range(limit):
                if place == self._pause_at and not self.go_on.is_set():
                    self.paused.set()
                    await _first_of(self.go_on, aborted)
                await asyncio.sleep(0)
                if aborted.is_set():
                    is_finished = True
                    yield Finished("abort")
                    return
                token_id = answer[place] if place < len(answer) else ord(".")
                yield SampledToken(token_id, logprob(token_id), 0, self._top(token_id, request.sampling.top_logprobs))
                if token_id in request.sampling.stop_token_ids:
                    is_finished = True
                    yield Finished("stop")
                    return
            is_finished = True
            yield Finished("length")
        finally:
            if not is_finished:
                self.left.append(request.request_id)
            if len(self.left) == len(self.requests):
                self.all_left.set()

    def _top(self, token_id: int, number: int) -> tuple[tuple[int, float], ...]:
        return tuple((other, logprob(other)) for other in sorted({0, 1, token_id})[:number])

    async def generate(self, request: GenerationRequest) -> Generation:
        return await collect(request, self.stream(request))

    async def abort(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._aborted[request_id].set()

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        raise NotImplementedError

    async def info(self) -> EngineInfo:
        return EngineInfo(NAME, self._max_length, self.vocab_size, 7)

    async def close(self) -> None:
        self.is_closed = True
        await self.abort(self._aborted)


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def text_ids(text: str) -> list[int]:
    return TOKENIZER.encode_text(text)


def completion_ids(text: str) -> list[int]:
    """Plain text that the model ends."""
    return [*text_ids(text), TOKENIZER.eos_id]


def message_ids(message: AssistantMessage, thinking: bool = True, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    """What the model samples to say `message` in K3's format."""
    ids = tokenizer.encode(render([message], effort=None, thinking=thinking, add_generation_prefix=False))
    return ids[len(tokenizer.encode(generation_prefix(thinking))) :]


def app_of(engine: FakeEngine, api_key: str | None = None) -> FastAPI:
    return create_app(engine, TOKENIZER, api_key=api_key)


def ask(app: FastAPI, use: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """What `use` makes of a client of `app`, without a socket between them."""

    async def run() -> T:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await asyncio.wait_for(use(client), 60)

    return asyncio.run(run())


class _Stage:
    """An EngineClient that is the engine put on it: one app can serve many tests."""

    engine: FakeEngine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@cache
def _stage(tokenizer: Tokenizer) -> tuple[_Stage, FastAPI]:
    stage = _Stage()
    return stage, create_app(stage, tokenizer)


def post(engine: FakeEngine, path: str, body: object, tokenizer: Tokenizer = TOKENIZER) -> httpx.Response:
    """The answer to one request. `body` may be what no JSON should be, NaN and lone surrogates."""
    content, headers = json.dumps(body), {"Content-Type": "application/json"}
    stage, app = _stage(tokenizer)
    stage.engine = engine
    return ask(app, lambda client: client.post(path, content=content, headers=headers))


def stream(engine: FakeEngine, path: str, body: dict[str, object], tokenizer: Tokenizer = TOKENIZER) -> list[dict[str, Any]]:
    """The events that answer a streaming request, after which the stream is done."""
    answer = post(engine, path, {**body, "stream": True}, tokenizer)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
