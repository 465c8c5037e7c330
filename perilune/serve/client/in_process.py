"""InProcessClient: an engine in a thread of this process, for any number of event loops."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import TypeVar

from torch import Tensor

from perilune.model.decoder import Decoder
from perilune.serve.client.collect import collect
from perilune.serve.engine import Engine, EngineEvent, EngineSettings
from perilune.serve.generation import EngineInfo, Finished, Generation, GenerationError, GenerationRequest, SampledToken

logger = logging.getLogger(__name__)
T = TypeVar("T")
Content = SampledToken | Finished | GenerationError


class _Mailbox:
    """Where the events of one request go: a queue on its caller's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Content] = asyncio.Queue()


class InProcessClient:
    """EngineClient over an engine of its own, made from `model`, whose weights it takes over (train a copy).

    The thread sleeps while there is nothing to do. `close` ends it; it never keeps the process alive.
    """

    def __init__(self, model: Decoder, settings: EngineSettings, *, name: str = "model", weight_version: int = 0) -> None:
        self._engine = Engine(model, settings, name=name, weight_version=weight_version)
        self._mailboxes: dict[str, _Mailbox] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="perilune-engine", daemon=True)
        self._thread.start()

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampledToken | Finished]:
        mailbox = _Mailbox()
        is_over = False
        try:
            await self._call(lambda: self._add(request, mailbox))
            while not is_over:
                content = await mailbox.queue.get()
                is_over = not isinstance(content, SampledToken)
                if isinstance(content, GenerationError):
                    raise content
                yield content
        finally:
            if not is_over:
                self._post(lambda: self._give_up(request.request_id, mailbox))

    async def generate(self, request: GenerationRequest) -> Generation:
        return await collect(request, self.stream(request))

    async def abort(self, request_ids: Collection[str]) -> None:
        ids = list(request_ids)
        await self._call(lambda: self._deliver(self._engine.abort(ids)))

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._call(lambda: self._engine.update_weights(weights, version))

    async def info(self) -> EngineInfo:
        return await self._call(self._engine.info)

    async def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # Called on event loops.

    async def _call(self, work: Callable[[], T]) -> T:
        """The result of `work`, done by the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(set_result: Callable[[], None]) -> None:
            if not result.done():
                set_result()

        def command() -> None:
            try:
                value = work()
            except Exception as error:
                _on_loop(loop, settle, lambda error=error: result.set_exception(error))
            else:
                _on_loop(loop, settle, lambda: result.set_result(value))

        if not self._post(command):
            raise GenerationError("the engine is closed: make a new client")
        return await result

    def _post(self, command: Callable[[], None]) -> bool:
        """Whether the engine will do it: not after it was closed."""
        with self._wake:
            if self._is_closed:
                return False
            self._commands.append(command)
            self._wake.notify()
        return True

    # Called on the engine's thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._engine.has_work or self._is_closed):
                    self._wake.wait()
                commands, is_closed = list(self._commands), self._is_closed
                self._commands.clear()
            for command in commands:
                command()
            if is_closed:
                break
            self._deliver(self._step())
        self._deliver(self._engine.abort(list(self._mailboxes)))

    def _step(self) -> list[EngineEvent]:
        try:
            return self._engine.step()
        except Exception as error:
            logger.exception("an engine step failed")
            return self._engine.fail_all(f"the engine failed in the step it was computing ({error}): send the request again")

    def _add(self, request: GenerationRequest, mailbox: _Mailbox) -> None:
        self._engine.add(request)
        self._mailboxes[request.request_id] = mailbox

    def _give_up(self, request_id: str, mailbox: _Mailbox) -> None:
        """The caller is gone: end its request, unless the id belongs to another's by now."""
        if self._mailboxes.get(request_id) is mailbox:
            self._engine.abort([request_id])
            del self._mailboxes[request_id]

    def _deliver(self, events: list[EngineEvent]) -> None:
        """Hand the events of a step to their loops, each loop woken once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Content]]] = {}
        for event in events:
            mailbox = self._mailboxes[event.request_id]
            by_loop.setdefault(mailbox.loop, []).append((mailbox, event.content))
            if not isinstance(event.content, SampledToken):
                del self._mailboxes[event.request_id]
        for loop, posts in by_loop.items():
            if not _on_loop(loop, _put_all, posts):
                gone = [i for i, mailbox in self._mailboxes.items() if mailbox.loop is loop]
                self._engine.abort(gone)
                for request_id in gone:
                    del self._mailboxes[request_id]


def _put_all(posts: list[tuple[_Mailbox, Content]]) -> None:
    for mailbox, content in posts:
        mailbox.queue.put_nowait(content)


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> bool:
    """Have the loop call it; False when the loop is closed, and nobody waits there any more."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        return False
    return True
