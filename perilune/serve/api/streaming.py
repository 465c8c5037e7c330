"""Answers that end with their client: whoever hangs up takes the work done for him along."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perilune.serve.api.errors import error_body, error_from

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; if the client hangs up first, `work` is cancelled and ClientGone raised."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hang_up(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, watch)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def close_iterator(iterator: AsyncIterator[Any]) -> None:
    """End an iterator early, as its own end would: `aclose`, if it has one."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


class EventStream(Response):
    """Server-sent events: first `begun`, then each item of `events`, as one `data:` line, then `data: [DONE]`. An exception on the
    way becomes an event with an `error` object, and the stream ends. When the client hangs up, the iterator is closed at once, also
    while it waits."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[BaseModel], begun: Sequence[BaseModel] = ()) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._begun = events, begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._send_all(send))
        watch = asyncio.ensure_future(_hang_up(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(work, watch)
            await close_iterator(self._events)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            for event in self._begun:
                await send(_event(event))
            async for event in self._events:
                await send(_event(event))
        except Exception as error:
            known = error_from(error)
            if known.status == 500:
                logger.exception("a stream failed")
            await send(_body(f"data: {json.dumps(error_body(known.status, known.message, known.param, known.code))}\n\n"))
        await send(_body("data: [DONE]\n\n"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def open_stream(request: Request, events: AsyncIterator[BaseModel]) -> EventStream:
    """A stream of `events` whose first is there already, so that what fails before it is answered with a status of its own.

    Raises what `events` raises, or ClientGone; the iterator is closed then.
    """
    try:
        first = await unless_disconnected(request, anext(events))
    except BaseException:
        await close_iterator(events)
        raise
    return EventStream(events, [first])


def _event(event: BaseModel) -> dict[str, object]:
    return _body(f"data: {event.model_dump_json(exclude_unset=True)}\n\n")


def _body(text: str) -> dict[str, object]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}
