"""An engine without a network: what it answers follows from the request alone, and a test can hold, break and watch it."""

import asyncio
import math
import queue
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import uvicorn
from fastapi import FastAPI
from torch import Tensor

from perilune.errors import UserError
from perilune.model.tokenizer import ByteTokenizer
from perilune.serve.api.app import create_app
from perilune.serve.client.collect import collect
from perilune.serve.generation import EngineBusyError, EngineInfo, Finished, FinishReason, Generation, GenerationRequest, SampledToken

VOCABULARY = 300
LENGTH = 64
HELD = 299
"""A prompt that begins with this id gets `hold_at` tokens, and then none until it is aborted."""
LAYERS, TOP_K = 2, 3
PATIENCE = 30.0
"""Seconds after which a test that waits for something gives up: only a broken test gets there."""


def token_for(request: GenerationRequest, place: int, version: int) -> SampledToken:
    """Ids and log-probabilities from a hash of request, place and version; the latter use all bits of a float."""
    sampling = request.sampling
    seed = hash((request.prompt_ids, sampling.seed or 0, place, version))
    id = seed % VOCABULARY
    logprob = -math.pi / (1 + seed % 9973) ** 3
    top = tuple(((id + n) % VOCABULARY, logprob * (n + 1)) for n in range(sampling.top_logprobs))
    return SampledToken(id, logprob, version, top)


class ScriptedEngine:
    """EngineClient. `script` may be replaced to give other tokens, `fail_at` raises at a place. A request is put into `arrived`, waits
    until `start` is set, is taken on, is put into `held` when HELD stops it, and into `ended` when it is over, however it ends."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new. What still runs keeps to the queues it began with."""
        self.script: Callable[[GenerationRequest, int, int], SampledToken] = token_for
        self.fail_at: dict[int, Exception] = {}
        self.start = threading.Event()
        self.start.set()
        self.arrived: queue.Queue[str] = queue.Queue()
        self.hold_at = 3
        self.held: queue.Queue[str] = queue.Queue()
        self.is_busy = False
        self.large_expert_ids = False
        self.requests: list[GenerationRequest] = []
        self.ended: queue.Queue[str] = queue.Queue()
        self.weights = {"a": torch.zeros(3, 2), "b.c": torch.zeros(5, dtype=torch.bfloat16), "scalar": torch.zeros(())}
        self.version = 0
        self.updates_at_once = 0
        self.most_updates_at_once = 0
        self._running: dict[str, asyncio.Event] = {}

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampledToken | Finished]:
        self.arrived.put(request.request_id)
        await asyncio.to_thread(self.start.wait, PATIENCE)
        self._check(request)
        self.requests.append(request)
        running, ended = self._running, self.ended
        aborted = running[request.request_id] = asyncio.Event()
        try:
            room = LENGTH - len(request.prompt_ids)
            limit = min(room, request.sampling.max_tokens or room)
            for place in range(limit):
                await asyncio.sleep(0)
                if place == self.hold_at and request.prompt_ids[0] == HELD:
                    self.held.put(request.request_id)
                    await aborted.wait()
                if aborted.is_set():
                    yield self._finished("abort", request, place)
                    return
                if place in self.fail_at:
                    raise self.fail_at[place]
                token = self.script(request, place, self.version)
                yield token
                if token.id in request.sampling.stop_token_ids:
                    yield self._finished("stop", request, place + 1)
                    return
            yield self._finished("length", request, limit)
        finally:
            running.pop(request.request_id, None)
            ended.put(request.request_id)

    def _finished(self, reason: FinishReason, request: GenerationRequest, count: int) -> Finished:
        """The end of a request, whose id is free before anyone hears of it."""
        self._running.pop(request.request_id, None)
        return Finished(reason, self._experts(request, count))

    async def generate(self, request: GenerationRequest) -> Generation:
        return await collect(request, self.stream(request))

    async def abort(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].set()

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.updates_at_once += 1
        self.most_updates_at_once = max(self.most_updates_at_once, self.updates_at_once)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            if weights.keys() != self.weights.keys():
                raise UserError(f"the tensors {sorted(weights.keys() ^ self.weights.keys())} are missing or unknown")
            for name, own in self.weights.items():
                if weights[name].shape != own.shape or not torch.isfinite(weights[name]).all():
                    raise UserError(f"{name} is misshapen or not finite")
            self.weights = {name: tensor.clone() for name, tensor in weights.items()}
            self.version = version
        finally:
            self.updates_at_once -= 1

    async def info(self) -> EngineInfo:
        return EngineInfo("scripted", LENGTH, VOCABULARY, self.version)

    async def close(self) -> None:
        await self.abort(list(self._running))

    def _check(self, request: GenerationRequest) -> None:
        if self.is_busy:
            raise EngineBusyError("7 requests are waiting: try again later")
        if request.request_id in self._running:
            raise UserError(f"request {request.request_id!r} is still running")
        if not request.prompt_ids:
            raise UserError("the prompt is empty")
        for token in (*request.prompt_ids, *request.sampling.stop_token_ids):
            if not 0 <= token < VOCABULARY:
                raise UserError(f"token id {token} is outside the vocabulary")
        if len(request.prompt_ids) + (request.sampling.max_tokens or 1) > LENGTH:
            raise UserError(f"a prompt of {len(request.prompt_ids)} tokens and max_tokens do not fit into {LENGTH}")

    def _experts(self, request: GenerationRequest, sampled: int) -> Tensor | None:
        if not request.record_experts:
            return None
        count = len(request.prompt_ids) + max(sampled - 1, 0)
        ids = torch.arange(count * LAYERS * TOP_K).reshape(count, LAYERS, TOP_K)
        return ids * 7 % (1000 if self.large_expert_ids else 200)


def scripted_app(engine: ScriptedEngine, max_update_bytes: int = 1 << 20) -> FastAPI:
    return create_app(engine, ByteTokenizer(), max_update_bytes=max_update_bytes)


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of a real server for `app`, in a thread, until the end of the block."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # it listens from here on, so nobody has to wait for the server
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield "http://{}:{}".format(*listening.getsockname())
        finally:
            server.should_exit = True
            thread.join()


async def next_of(ids: queue.Queue[str]) -> str:
    return await asyncio.to_thread(ids.get, timeout=PATIENCE)
