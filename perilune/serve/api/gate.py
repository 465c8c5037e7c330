"""What a request must pass before any route sees it: the key, the type of its body, the size of its body."""

import secrets
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.serve.api.errors import ApiError

MAX_BODY_BYTES = 16 << 20
"""A million token ids are about seven."""
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")


class Gate:
    """ASGI middleware that raises ApiError for a request that may not pass.

    `api_key`: what `Authorization: Bearer` must carry, everywhere but on `open_paths`; None: no key is asked for.

    Bodies must be declared as JSON, also where there is none: a web page can post text and forms to any address without asking, and
    a browser sends JSON from elsewhere only where the server said so, which this one never does. Routes of `own_check_paths` look at
    type and size themselves.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        open_paths: Collection[str],
        own_check_paths: Collection[str],
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._app, self._open_paths, self._own_check_paths = app, open_paths, own_check_paths
        self._key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._key is not None and scope["path"] not in self._open_paths:
            self._check_key(self._key, headers)
        if scope["path"] not in self._own_check_paths:
            if scope["method"] not in _WITHOUT_BODY:
                _check_type(headers)
            receive = self._counted(receive, headers)
        await self._app(scope, receive, send)

    def _check_key(self, key: bytes, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Headers are decoded as latin-1: this gives their bytes back.
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode("latin-1"), key):
            raise ApiError(401, "a key is needed: send the server's as Authorization: Bearer KEY", code="invalid_api_key")

    def _counted(self, receive: Receive, headers: Headers) -> Receive:
        limit = self._max_body_bytes
        message = f"the body is larger than {limit} bytes: send less"
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise ApiError(413, message)
        size = 0

        async def counted() -> Message:
            nonlocal size
            part = await receive()
            size += len(part.get("body", b""))
            if size > limit:
                raise HTTPException(413, message)  # the one kind of error that passes FastAPI's reading of the body unchanged
            return part

        return counted


def _check_type(headers: Headers) -> None:
    given = headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        what = f"not {given!r}" if given else "and this request has none"
        raise ApiError(415, f"the Content-Type must be application/json, {what}", code="unsupported_media_type")
