"""Engine: requests in, tokens out, one step at a time. Single-threaded; `client/in_process.py` drives it from a thread.

Continuous batching: requests join and leave between any two steps. Each has a slot of the state pool from admission to its end, so
a running request is never put back. Weights are replaced between steps, in place.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.errors import UserError
from perilune.model.decoder import Decoder
from perilune.serve.generation import (
    EngineBusyError,
    EngineInfo,
    Finished,
    FinishReason,
    GenerationError,
    GenerationRequest,
    SampledToken,
)
from perilune.serve.runner import Runner
from perilune.serve.sampler import sample
from perilune.serve.scheduler import Scheduler
from perilune.serve.sequence import Sequence
from perilune.serve.state_pool import StatePool
from perilune.serve.weights import check_weights, copy_weights


@dataclass(frozen=True)
class EngineSettings:
    """`max_sequences`: how many run at once. `max_length`: tokens of the longest, prompt included. `prefill_tokens`: prompt tokens read
    in one step. `max_waiting`: requests that may queue. `num_ids`: ids from this one on are never sampled, for a network with more
    embeddings than its tokenizer has tokens; None: all may be."""

    max_sequences: int = 16
    max_length: int = 4096
    prefill_tokens: int = 512
    max_waiting: int = 16384
    num_ids: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_length", "prefill_tokens", "max_waiting", "num_ids"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: it must be at least 1")


@dataclass(frozen=True)
class EngineEvent:
    """Something for the caller of a request; after Finished or GenerationError no more comes."""

    request_id: str
    content: SampledToken | Finished | GenerationError


class Engine:
    """Generates with `model`, whose weights it owns from now on. Raises UserError for settings that do not fit the machine."""

    def __init__(
        self, model: Decoder, settings: EngineSettings = EngineSettings(), *, name: str = "model", weight_version: int = 0
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._settings = settings
        self._pool = StatePool(model.config, settings.max_sequences, settings.max_length, model.lm_head.weight.dtype)
        self._runner = Runner(self._model, self._pool.state)
        self._scheduler = Scheduler(settings.prefill_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._outbox: list[EngineEvent] = []
        """Events not yet handed out: of a step that raises, they wait for `fail_all`."""
        self._name, self._weight_version = name, weight_version

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def info(self) -> EngineInfo:
        return EngineInfo(self._name, self._settings.max_length, self._model.config.vocab_size, self._weight_version)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises UserError or EngineBusyError, as EngineClient says."""
        self._check_request(request)
        if len(self._scheduler.waiting) >= self._settings.max_waiting:
            raise EngineBusyError(f"{len(self._scheduler.waiting)} requests are waiting, the most this engine queues: try again later")
        sequence = Sequence(request, self._settings.max_length)
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_ids: Collection[str]) -> list[EngineEvent]:
        """End these requests; unknown ids are ignored."""
        for request_id in dict.fromkeys(request_ids):
            if request_id in self._sequences:
                self._finish(self._sequences[request_id], "abort")
        return self._take_events()

    def step(self) -> list[EngineEvent]:
        """Admit what fits, read and sample one step, and say what came of it. Without work it does nothing."""
        while self._pool.num_free and self._scheduler.waiting:
            self._scheduler.admit().slot = self._pool.lend()
        plan = self._scheduler.plan()
        if not plan.decode and not plan.prefill:
            return []
        logits = self._runner.run(plan)
        broken = (~torch.isfinite(logits.values).all(-1)).tolist()
        whole = [row for row, is_broken in enumerate(broken) if not is_broken]
        sequences = [logits.sequences[row] for row in whole]
        samples = sample(logits.values[whole], [s.draw() for s in sequences], self._settings.num_ids)
        for sequence, is_broken in zip(logits.sequences, broken, strict=True):
            if is_broken:
                self._fail(sequence, self._not_finite(sequence))
        for sequence, token, logprob, top in zip(sequences, samples.ids, samples.logprobs, samples.top, strict=True):
            reason = sequence.append(token)
            self._tell(sequence, SampledToken(token, logprob, self._weight_version, top))
            if reason is not None:
                self._finish(sequence, reason)
        return self._take_events()

    def fail_all(self, reason: str) -> list[EngineEvent]:
        """After a step that raised: what had come of it, then a GenerationError for every request, for nobody knows what it left in
        their states."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, reason, is_state_known=False)
        return self._take_events()

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights. Raises UserError, with nothing changed, if they are not those of this model or not finite."""
        check_weights(self._model, weights)
        copy_weights(self._model, weights)
        self._weight_version = version

    def check(self) -> None:
        """The invariants that hold between any two calls. Raises AssertionError."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        assert sorted(map(id, self._sequences.values())) == sorted(map(id, [*running, *waiting]))
        assert all(s.slot is None and s.num_seen == 0 for s in waiting)
        slots = [s.slot for s in running if s.slot is not None]
        assert len(slots) == len(running) == len(set(slots))
        self._pool.check(set(slots))

    def _check_request(self, request: GenerationRequest) -> None:
        if request.request_id in self._sequences:
            raise UserError(f"request {request.request_id!r} is still running: give each its own request_id")
        if not request.prompt_ids:
            raise UserError("the prompt is empty: give at least one token")
        longest = self._settings.max_length
        if len(request.prompt_ids) + (request.sampling.max_tokens or 1) > longest:
            raise UserError(
                f"the prompt's {len(request.prompt_ids)} tokens and max_tokens {request.sampling.max_tokens or 1} are more than the "
                f"{longest} tokens of this engine's longest sequence: shorten the prompt or lower max_tokens"
            )
        vocabulary = self._model.config.vocab_size
        ids = (*request.prompt_ids, *request.sampling.stop_token_ids)
        if not (min(ids) >= 0 and max(ids) < vocabulary):
            wrong = next(token for token in ids if not 0 <= token < vocabulary)
            raise UserError(f"token id {wrong} is outside the model's vocabulary of {vocabulary}")

    def _tell(self, sequence: Sequence, content: SampledToken | Finished | GenerationError) -> None:
        self._outbox.append(EngineEvent(sequence.request.request_id, content))

    def _take_events(self) -> list[EngineEvent]:
        events, self._outbox = self._outbox, []
        return events

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._tell(sequence, Finished(reason, sequence.experts()))
        self._drop(sequence, sequence.num_seen)

    def _fail(self, sequence: Sequence, reason: str, *, is_state_known: bool = True) -> None:
        self._tell(sequence, GenerationError(reason))
        self._drop(sequence, sequence.num_seen if is_state_known else None)

    def _not_finite(self, sequence: Sequence) -> str:
        where = f"at token {len(sequence.ids)} the model's logits are not finite (weight version {self._weight_version})"
        return f"{where}: load weights that are not damaged"

    def _drop(self, sequence: Sequence, num_tokens: int | None) -> None:
        """`num_tokens`: how many may have left something in the state; None: nobody knows."""
        del self._sequences[sequence.request.request_id]
        self._scheduler.remove(sequence)
        if sequence.slot is not None:
            self._pool.take_back(sequence.slot, num_tokens)
