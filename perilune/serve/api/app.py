"""create_app: every route over one engine, behind one gate."""

from fastapi import FastAPI, Request
from fastapi.responses import Response

import perilune
from perilune.errors import UserError
from perilune.model.vocabulary import Tokenizer
from perilune.serve.api.chat import chat_router
from perilune.serve.api.completions import completions_router
from perilune.serve.api.control import control_router
from perilune.serve.api.errors import install_error_handlers
from perilune.serve.api.gate import Gate
from perilune.serve.api.generate import generate_router
from perilune.serve.api.models import models_router
from perilune.serve.api.streaming import ClientGone
from perilune.serve.client.protocol import EngineClient

_OPEN_PATHS = frozenset({"/health"})
_OWN_CHECK_PATHS = frozenset({"/update_weights"})
"""A file of weights is neither JSON nor small: the route checks it."""


def create_app(client: EngineClient, tokenizer: Tokenizer, *, api_key: str | None = None, max_update_bytes: int = 0) -> FastAPI:
    """The HTTP interface of `client`, whose prompts and answers `tokenizer` encodes and decodes.

    `api_key`: every request but GET /health must carry it. `max_update_bytes`: the largest file that /update_weights takes
    (`largest_update` of the model; by default none). Raises UserError for an empty key, or a vocabulary without a chat format.
    """
    if api_key is not None and not api_key.strip():
        raise UserError("the API key is empty: give one, or none to serve without")
    app = FastAPI(title="Perilune", version=perilune.__version__, docs_url=None, redoc_url=None)
    app.include_router(models_router(client))
    app.include_router(chat_router(client, tokenizer))
    app.include_router(completions_router(client, tokenizer))
    app.include_router(generate_router(client, tokenizer))
    app.include_router(control_router(client, max_update_bytes))
    app.add_exception_handler(ClientGone, _answer_nobody)
    app.add_middleware(Gate, api_key=api_key, open_paths=_OPEN_PATHS, own_check_paths=_OWN_CHECK_PATHS)
    install_error_handlers(app)  # last, so outermost: what the gate refuses is answered there too
    return app


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
