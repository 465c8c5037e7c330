"""What goes into the engine and what comes out: plain data, in token ids. No text is ever encoded or decoded in here."""

import math
import secrets
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from perilune.errors import UserError

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: a stop token was sampled. `length`: max_tokens or the engine's longest sequence was reached. `abort`: someone asked for it."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Each is drawn from softmax(logits / temperature), cut to the `top_k` likeliest, of which the fewest that
    hold `top_p` of the probability are kept; temperature 0 takes the likeliest.

    `max_tokens=None`: until the engine's longest sequence is full. `top_k=0`: no cut. `seed`: the same seed gives the same tokens
    whatever else is in the batch, up to the rounding of the logits; None draws one. `stop_token_ids`: sampling one ends the
    request, and it is part of the output. `top_logprobs`: how many of the likeliest tokens each sampled one is reported with.

    Raises UserError for a value outside its range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, self.temperature >= 0 and math.isfinite(self.temperature), "a finite number from 0 on"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 1, or 0 for no cut"),
            # Elsewhere -1 asks for a random seed: a group of equal answers would be a costly misunderstanding.
            ("seed", self.seed, self.seed is None or self.seed >= 0, "at least 0, or none for one that is drawn"),
            ("top_logprobs", self.top_logprobs, 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, f"between 0 and {MAX_TOP_LOGPROBS}"),
        )
        for name, value, is_good, wanted in checks:
            if not is_good:
                raise UserError(f"{name} is {value}: it must be {wanted}")


MAX_TOP_LOGPROBS = 20
"""The OpenAI API's limit."""


def new_request_id() -> str:
    return secrets.token_hex(12)


@dataclass(frozen=True)
class GenerationRequest:
    """Continue `prompt_ids` (at least one). `record_experts`: also return which experts every token was sent to."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    record_experts: bool = False
    request_id: str = field(default_factory=new_request_id)


@dataclass(frozen=True)
class SampledToken:
    """One token the engine sampled.

    `logprob`: natural logarithm of its probability in the model's own distribution, softmax(logits), whatever temperature, top_p
    and top_k made of it. `top`: (id, logprob) of the likeliest tokens, falling. `weight_version`: of the weights that gave the logits.
    """

    id: int
    logprob: float
    weight_version: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last event of a request.

    `experts`: with `record_experts`, int64 [positions, moe_layers, top_k]: the experts of prompt and sampled tokens, but for those
    that the network has not seen: the last sampled one, and what an abort left unread.
    """

    reason: FinishReason
    experts: Tensor | None = None


@dataclass(frozen=True)
class Generation:
    """A whole answer, or with reason `abort` as much of it as there was."""

    request: GenerationRequest
    tokens: tuple[SampledToken, ...]
    finished: Finished

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(token.logprob for token in self.tokens)


@dataclass(frozen=True)
class EngineInfo:
    """What a client should know. `name`: the model's, as requests give it. `max_length`: longest sequence, prompt included."""

    name: str
    max_length: int
    vocab_size: int
    weight_version: int


class GenerationError(Exception):
    """The engine could not go on with a request, through no fault of it: the sentence says why."""


class EngineBusyError(GenerationError):
    """So many requests are waiting that the engine takes no more: try again later."""
