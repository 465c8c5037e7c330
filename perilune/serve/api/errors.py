"""Errors as the OpenAI API words them: a status and one JSON object that says what was wrong and with which field."""

import json
import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.errors import UserError
from perilune.serve.generation import EngineBusyError, GenerationError

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_LONGEST = 1000
"""Characters of a message: it may quote what the client sent."""


class ApiError(Exception):
    """An answer with this status. `param` is the request field at fault, `code` a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    named = None if param is None else _cut(param)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": _cut(message), "type": kind, "param": named, "code": code}}


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def error_from(error: Exception) -> ApiError:
    """Any exception a service may raise, as the answer it becomes."""
    match error:
        case ApiError():
            return error
        case UserError():
            return ApiError(400, str(error))
        case EngineBusyError():
            return ApiError(503, str(error), code="engine_busy")
        case GenerationError():
            return ApiError(500, str(error), code="generation_failed")
        case RequestValidationError():
            return _from_validation(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case _:
            return ApiError(500, "the server failed on this request: its log says why", code="internal_error")


def _from_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    where = field_path(first["loc"][1:]) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first['ctx']['error']})")
    if where is None and first["type"] == "string_unicode":
        return ApiError(400, "a field whose name holds a lone surrogate is not supported: leave it out", code="unsupported_parameter")
    if where is None:
        return ApiError(400, "the body must be a JSON object")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{where} is not supported: leave it out", where, "unsupported_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{where} is missing", where, "missing_required_parameter")
    if first["type"] == "model_type":
        return ApiError(400, f"{where}: it must be a JSON object", where)
    return ApiError(400, f"{where}: {first['msg'].removeprefix('Value error, ')}", where)


def field_path(parts: Sequence[str | int]) -> str:
    """A field of the request as OpenAI spells it: messages[2].content[0].type."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def error_answer(error: Exception) -> Response:
    """The answer to a request that raised `error`. What is the server's own fault is logged."""
    known = error_from(error)
    if known.status == 500:
        logger.error("a request failed", exc_info=error)
    headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(known.status)
    body = error_body(known.status, known.message, known.param, known.code)
    # In ASCII: a message may quote a lone surrogate, which UTF-8 cannot carry and JSON's escapes can.
    return Response(json.dumps(body), known.status, headers, media_type="application/json")


class AnswerErrors:
    """ASGI middleware: whatever is raised further in becomes an answer, unless one has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            await error_answer(error)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Every error leaves the app in the form of `error_body`."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_answer(error)

    for kind in (RequestValidationError, HTTPException):  # for these FastAPI has answers of its own
        app.add_exception_handler(kind, answer)
    app.add_middleware(AnswerErrors)
