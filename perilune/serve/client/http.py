"""HttpClient: an engine behind the token endpoint and the control endpoints of `perilune serve`."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, TypeAdapter
from torch import Tensor

from perilune.errors import UserError
from perilune.serve.api.generate_types import EngineFacts, GenerateChoice, GenerateChunk, decode_experts
from perilune.serve.client.collect import collect
from perilune.serve.client.safetensors_stream import SafetensorsStream
from perilune.serve.generation import (
    EngineBusyError,
    EngineInfo,
    Finished,
    Generation,
    GenerationError,
    GenerationRequest,
    SampledToken,
)

_CONNECT_SECONDS = 10.0


class _ErrorDetail(BaseModel):
    message: str
    type: str
    code: str | None = None


class _ErrorBody(BaseModel):
    error: _ErrorDetail


_EVENT: TypeAdapter[_ErrorBody | GenerateChunk] = TypeAdapter(_ErrorBody | GenerateChunk)


@dataclass(eq=False)
class _Running:
    """A request of this client. `opening`: the wait for the beginning of its answer, None after that."""

    request_id: str
    opening: asyncio.Timeout | None = None


class HttpClient:
    """EngineClient over HTTP.

    `base_url`: the server's root (a `/v1` at its end is left off). `model`: the name to ask for; without, whatever is served.
    `timeout`: seconds without a byte from the server after which it is taken for dead (None: never); a request may wait that long
    for its first token. Proxy settings and passwords of the environment are not used.

    Usable from one event loop after the other, not from two at once: every request has a connection of its own, and none is kept for
    the next, which the server could be closing at that moment. Besides what EngineClient says, GenerationError is raised when no
    server answers or a connection breaks, and UserError when the server refuses the key or the model's name.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, model: str | None = None, timeout: float | None = 600.0) -> None:
        self._address = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        try:
            is_http = httpx.URL(self._address).scheme in ("http", "https") and bool(httpx.URL(self._address).host)
        except httpx.InvalidURL:
            is_http = False
        if not is_http:
            raise UserError(f"{base_url!r} is no address of an engine: give one such as http://127.0.0.1:8000")
        if api_key is not None and (not api_key or api_key != api_key.strip() or not api_key.isprintable()):
            raise UserError("the API key is empty or has spaces around it or line breaks: check where it was read from")
        self._http = httpx.AsyncClient(
            headers={b"Authorization": f"Bearer {api_key}".encode()} if api_key is not None else {},
            timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self._running: set[_Running] = set()
        self._is_closed = False

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampledToken | Finished]:
        self._check_open()
        finished: Finished | None = None
        running = _Running(request.request_id)
        self._running.add(running)
        try:
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(None) as running.opening:
                        answer = self._answer("POST", "/inference/v1/generate", json=_body(request, self._model))
                        response = await stack.enter_async_context(answer)
                except TimeoutError:
                    # Aborted before the first token. The server may not know the request yet: hanging up ends it when it does.
                    finished = Finished("abort")
                else:
                    running.opening = None
                    events = await stack.enter_async_context(aclosing(self._events(response)))
                    async for event in events:
                        if isinstance(event, Finished):
                            finished = event
                            break
                        yield event
        finally:
            self._running.remove(running)
        if finished is None:
            raise GenerationError(f"the engine at {self._address} ended its answer before it was finished: send the request again")
        yield finished

    async def generate(self, request: GenerationRequest) -> Generation:
        return await collect(request, self.stream(request))

    async def abort(self, request_ids: Collection[str]) -> None:
        self._check_open()
        await self._abort(request_ids)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sends one tensor after the other, each copied to the CPU when its turn comes: change none of them meanwhile."""
        self._check_open()
        body = SafetensorsStream(weights)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(body.size)}
        async with self._answer("POST", "/update_weights", params={"version": version}, content=body, headers=headers):
            pass

    async def info(self) -> EngineInfo:
        self._check_open()
        async with self._answer("GET", "/get_weight_version") as response:
            body = await response.aread()
        try:
            facts = EngineFacts.model_validate_json(body)
        except ValueError as error:
            raise self._strange(error) from None
        return EngineInfo(facts.model, facts.max_model_len, facts.vocab_size, facts.weight_version)

    async def close(self) -> None:
        """End this client's requests, whose callers get what there is with reason `abort`. The engine goes on for others."""
        self._is_closed = True
        # A server that does not answer has ended them already.
        with suppress(GenerationError):
            await self._abort([running.request_id for running in self._running])

    def _check_open(self) -> None:
        if self._is_closed:
            raise GenerationError(f"this client of the engine at {self._address} is closed: make a new one")

    async def _abort(self, request_ids: Collection[str]) -> None:
        if not request_ids:
            return
        for running in self._running:
            if running.request_id in request_ids and running.opening is not None and not running.opening.expired():
                running.opening.reschedule(0)
        async with self._answer("POST", "/abort_requests", json={"request_ids": list(request_ids)}):
            pass

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **arguments: Any) -> AsyncIterator[httpx.Response]:
        """The server's answer with its body still to be read; its errors and the connection's as our exceptions."""
        has_answer = False
        try:
            async with self._http.stream(method, self._address + path, **arguments) as response:
                has_answer = True
                if response.status_code != httpx.codes.OK:
                    raise _error(response.status_code, await response.aread())
                yield response
        except httpx.HTTPError as error:
            what = "the answer broke off" if has_answer else "no answer came"
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise GenerationError(f"{what} from the engine at {self._address} ({reason}): see that it runs, and ask again") from error

    async def _events(self, response: httpx.Response) -> AsyncGenerator[SampledToken | Finished]:
        async with aclosing(_lines(response)) as lines:
            async for line in lines:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                try:
                    event = _EVENT.validate_json(data)
                    if isinstance(event, _ErrorBody):
                        raise _stream_error(event.error)
                    decoded = [item for choice in event.choices for item in _decode(choice)]
                except ValueError as error:
                    raise self._strange(error) from None
                for item in decoded:
                    yield item

    def _strange(self, error: ValueError) -> GenerationError:
        text = " ".join(str(error).split())[:300]
        return GenerationError(f"what answers at {self._address} is no Perilune server of this version ({text}): check the address")


def _body(request: GenerationRequest, model: str | None) -> dict[str, Any]:
    sampling = request.sampling
    body = {
        "request_id": request.request_id,
        "token_ids": request.prompt_ids,
        "sampling_params": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop_token_ids": sampling.stop_token_ids,
            "logprobs": sampling.top_logprobs,
            # An engine's client names all the ids that end its request.
            "ignore_eos": True,
        },
        "stream": True,
        "return_routed_experts": request.record_experts,
    }
    return body if model is None else body | {"model": model}


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Split at line feeds alone: httpx also splits at the separators that JSON may hold inside a string."""
    parts: list[bytes] = []
    async for piece in response.aiter_bytes():
        *whole, rest = piece.split(b"\n")
        for line in whole:
            yield b"".join((*parts, line))
            parts.clear()
        parts.append(rest)


def _decode(choice: GenerateChoice) -> list[SampledToken | Finished]:
    """Raises ValueError for what the endpoint never sends."""
    items: list[SampledToken | Finished] = []
    for token, logprob, version in zip(choice.token_ids, choice.logprobs.content, choice.weight_versions, strict=True):
        top = tuple((int(other.token.removeprefix("token_id:")), other.logprob) for other in logprob.top_logprobs)
        items.append(SampledToken(token, logprob.logprob, version, top))
    if choice.finish_reason is not None:
        experts = choice.routed_experts
        items.append(Finished(choice.finish_reason, decode_experts(experts) if experts is not None else None))
    return items


def _error(status: int, body: bytes) -> Exception:
    try:
        message = _ErrorBody.model_validate_json(body).error.message
    except ValueError:
        text = body[:200].decode("utf-8", "replace").strip()
        message = f"the engine's server answered with status {status}{f' ({text})' if text else ''}: check the address and its log"
    if status in (429, 503):
        return EngineBusyError(message)
    return UserError(message) if 400 <= status < 500 else GenerationError(message)


def _stream_error(error: _ErrorDetail) -> Exception:
    if error.code == "engine_busy":
        return EngineBusyError(error.message)
    return GenerationError(error.message) if error.type == "server_error" else UserError(error.message)
