"""What an RL loop steers an engine with: end requests early, replace the weights, ask which weights are in."""

import asyncio
import errno
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.requests import ClientDisconnect

from perilune.serve.api.errors import ApiError
from perilune.serve.api.generate_types import AbortBody, EngineFacts, WeightVersion
from perilune.serve.api.streaming import ClientGone
from perilune.serve.client.protocol import EngineClient

_WEIGHTS_TYPE = "application/octet-stream"
_WRITE_BYTES = 4 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def control_router(client: EngineClient, max_update_bytes: int) -> APIRouter:
    """POST /abort_requests, GET /get_weight_version, POST /update_weights. An update larger than `max_update_bytes`
    (`largest_update` of the model served) is refused before it can fill the disk."""
    router = APIRouter()
    updating = asyncio.Lock()

    @router.post("/abort_requests")
    async def abort_requests(body: AbortBody) -> dict[str, str]:
        """The callers of these requests get what was sampled so far, with finish_reason `abort`. Unknown ids are ignored."""
        await client.abort(body.request_ids)
        return {}

    @router.get("/get_weight_version")
    async def get_weight_version() -> EngineFacts:
        info = await client.info()
        return EngineFacts(weight_version=info.weight_version, model=info.name, max_model_len=info.max_length, vocab_size=info.vocab_size)

    @router.post("/update_weights")
    async def update_weights(request: Request, version: Annotated[int, Query(ge=0, le=2**63 - 1)]) -> WeightVersion:
        """Body: a safetensors file with the whole state_dict. All or nothing; running requests go on with the new weights."""
        _check_type(request)
        async with _body_in_a_file(request, max_update_bytes) as path:
            try:
                # Mapped, not read: the file's pages are the one copy beside the model's own weights.
                weights = await asyncio.to_thread(load_file, path)
            except (SafetensorError, ValueError) as error:
                raise ApiError(400, f"the body is not a whole safetensors file ({error}): send the model's state_dict as one") from None
            async with updating:
                await client.update_weights(weights, version)
        return WeightVersion(weight_version=version)

    return router


def _check_type(request: Request) -> None:
    # A web page can post a few types to any address without asking; this is not among them.
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != _WEIGHTS_TYPE:
        raise ApiError(415, f"weights are sent with Content-Type {_WEIGHTS_TYPE}, this has {given!r}")


@asynccontextmanager
async def _body_in_a_file(request: Request, limit: int) -> AsyncIterator[Path]:
    """The body as a temporary file, removed at the end. Raises ApiError, or ClientGone when the sender hangs up half-way."""
    if int(request.headers.get("content-length", "0")) > limit:
        raise _too_large(limit)
    with tempfile.TemporaryDirectory(prefix="perilune-weights-") as directory:
        path = Path(directory) / "weights.safetensors"
        try:
            await _write_body(request, path, limit)
        except ClientDisconnect:
            raise ClientGone from None
        except OSError as error:
            if error.errno in _DISK_FULL:
                advice = "free space there or start the server with TMPDIR on a larger disk"
                raise ApiError(507, f"no space left for the weights in {tempfile.gettempdir()}: {advice}") from None
            raise ApiError(500, f"cannot keep the weights in {tempfile.gettempdir()} ({error})") from None
        yield path


async def _write_body(request: Request, path: Path, limit: int) -> None:
    size = 0
    waiting = bytearray()
    with path.open("wb") as file:
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            waiting += piece
            if len(waiting) >= _WRITE_BYTES:
                await asyncio.to_thread(file.write, waiting)
                waiting = bytearray()
        await asyncio.to_thread(file.write, waiting)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the weights are more than the {limit} bytes that this model's can have: send its state_dict and nothing else")
