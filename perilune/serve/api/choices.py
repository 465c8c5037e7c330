"""From the engine's tokens to the pieces of an answer: one choice, and several at once.

A `Reader` holds all that is known about one choice and does no waiting, so it can be tested token by token; what waits is here.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, TypeVar

from perilune.serve.api.streaming import close_iterator
from perilune.serve.client.protocol import EngineClient
from perilune.serve.generation import Finished, FinishReason, GenerationError, GenerationRequest, SampledToken

Piece = TypeVar("Piece", covariant=True)
T = TypeVar("T")


class Reader(Protocol[Piece]):
    """Reads the tokens of one choice."""

    @property
    def is_over(self) -> bool:
        """The choice ended with the last token pushed, though the engine would go on."""

    def push(self, token: SampledToken) -> Piece: ...

    def finish(self, reason: FinishReason) -> Piece:
        """The last piece: what was held back, and how it ended. `reason`: the engine's, `stop` when `is_over`."""


async def read_choice(client: EngineClient, request: GenerationRequest, reader: Reader[Piece]) -> AsyncGenerator[Piece]:
    """The pieces of one choice, one per token and a last one. Closing it early, or a reader that is over, aborts the request."""
    events = client.stream(request)
    try:
        async for event in events:
            if isinstance(event, Finished):
                yield reader.finish(event.reason)
                return
            yield reader.push(event)
            if reader.is_over:
                break
        else:
            raise GenerationError(f"the engine left off request {request.request_id} before its end: send it again")
    finally:
        await close_iterator(events)
    yield reader.finish("stop")


async def at_once(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """What all of the sources yield, as it comes, with the number of the source. The first that raises ends them all."""
    queue: asyncio.Queue[tuple[int, T] | _End] = asyncio.Queue()

    async def pump(number: int, source: AsyncGenerator[T]) -> None:
        try:
            async for item in source:
                queue.put_nowait((number, item))
            queue.put_nowait(_End(None))
        except Exception as error:
            queue.put_nowait(_End(error))

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
