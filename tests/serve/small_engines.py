"""Engines over tiny random networks, and what runs them to the end."""

from collections.abc import Iterable
from pathlib import Path

import torch

from perilune.model.decoder import Decoder
from perilune.model.hub import save_model
from perilune.model.tokenizer import ByteTokenizer
from perilune.serve.engine import Engine, EngineSettings
from perilune.serve.generation import Finished, Generation, GenerationError, GenerationRequest, SampledToken, SamplingParams
from tests.model.tiny_models import k3_config, random_ids, random_model

LENGTH = 256


def small_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    return random_model(k3_config(), dtype, seed)


def small_engine(model: Decoder | None = None, **changes: int) -> Engine:
    settings = {"max_sequences": 4, "max_length": LENGTH, "prefill_tokens": 64} | changes
    return Engine(model or small_model(), EngineSettings(**settings), name="small")


def save_small_model(folder: Path, vocab_size: int, max_length: int) -> Path:
    """A Hub directory of a network over bytes; with more than 268 ids, more than its tokenizer has, as padded vocabularies do."""
    save_model(random_model(k3_config(vocab_size=vocab_size, max_position_embeddings=max_length), torch.float32), folder)
    ByteTokenizer().save(folder)
    return folder


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random_ids(length, seed=seed).tolist())


def request(length: int = 5, content: int = 0, *, record_experts: bool = False, **sampling: object) -> GenerationRequest:
    """A prompt of that many random tokens; `content` seeds them, and the sampling unless a seed is given."""
    return GenerationRequest(prompt(length, content), SamplingParams(**{"max_tokens": 8, "seed": content} | sampling), record_experts)


class Collected:
    """Events by request, as an engine's caller would keep them."""

    def __init__(self, requests: Iterable[GenerationRequest]) -> None:
        self.requests = {r.request_id: r for r in requests}
        self.tokens: dict[str, list[SampledToken]] = {i: [] for i in self.requests}
        self.ends: dict[str, Finished | GenerationError] = {}

    def take(self, events) -> None:
        for event in events:
            assert event.request_id not in self.ends, "an event after the end"
            if isinstance(event.content, SampledToken):
                self.tokens[event.request_id].append(event.content)
            else:
                self.ends[event.request_id] = event.content

    def generation(self, request: GenerationRequest) -> Generation:
        end = self.ends[request.request_id]
        assert isinstance(end, Finished), end
        return Generation(request, tuple(self.tokens[request.request_id]), end)


def run_to_end(engine: Engine, requests: list[GenerationRequest]) -> list[Generation]:
    """All requests at once, the engine's invariants checked after every step."""
    collected = Collected(requests)
    for r in requests:
        engine.add(r)
    while engine.has_work:
        collected.take(engine.step())
        engine.check()
    return [collected.generation(r) for r in requests]
