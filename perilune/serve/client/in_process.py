"""InProcessClient: an engine in a thread of this process, for any number of event loops."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from functools import partial
from typing import TypeVar, cast

from torch import Tensor

from perilune.model.decoder import Decoder
from perilune.serve.client.collect import collect
from perilune.serve.engine import Engine, EngineSettings
from perilune.serve.engine_thread import EngineThread, Mailbox, on_loop
from perilune.serve.generation import EngineInfo, Finished, Generation, GenerationError, GenerationRequest, SampledToken

T = TypeVar("T")


class InProcessClient:
    """EngineClient over an engine of its own, made from `model`, whose weights it takes over (train a copy).

    The engine's thread sleeps while there is nothing to do. It ends with `close`, when the client is forgotten, or with the process.
    """

    def __init__(self, model: Decoder, settings: EngineSettings, *, name: str = "model", weight_version: int = 0) -> None:
        self._thread = EngineThread(Engine(model, settings, name=name, weight_version=weight_version))
        weakref.finalize(self, self._thread.stop).atexit = False  # at exit the thread stops itself

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampledToken | Finished]:
        mailbox = Mailbox()
        is_over = False
        try:
            await self._call(lambda: self._thread.add(request, mailbox))
            while not is_over:
                content = await mailbox.queue.get()
                is_over = not isinstance(content, SampledToken)
                if isinstance(content, GenerationError):
                    raise content
                yield content
        finally:
            if not is_over:
                self._thread.post(lambda: self._thread.give_up(request.request_id, mailbox))

    async def generate(self, request: GenerationRequest) -> Generation:
        return await collect(request, self.stream(request))

    async def abort(self, request_ids: Collection[str]) -> None:
        ids = list(request_ids)
        await self._call(lambda: self._thread.abort(ids))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._call(lambda: self._thread.with_engine(lambda engine: engine.update_weights(weights, version)))

    async def info(self) -> EngineInfo:
        """What there is to know without waiting for the step at work."""
        self._check_open()
        return self._thread.info

    async def close(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._thread.stop()))

    def _check_open(self) -> None:
        if self._thread.is_stopped:
            raise GenerationError("the engine is closed: make a new client")

    async def _call(self, work: Callable[[], T]) -> T:
        """The result of `work`, done by the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(cast(T, value))

        def command() -> None:
            try:
                value, failure = work(), None
            except Exception as error:
                value, failure = None, error
            on_loop(loop, partial(settle, value, failure))

        if not self._thread.post(command):
            self._check_open()
        return await result
