"""What both text endpoints accept, down to the last field.

A field that this server does not honour is refused by name, never ignored: whoever sets one wants something. A value that asks
for nothing passes: null, or what is meant where the field is left out (`NEUTRAL`). Names and meanings are the OpenAI API's; the
fields described as vLLM's are extensions that clients of vLLM know.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from perilune.serve.generation import SamplingParams

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that its multiples are all different modulo a power of two."""

Neutral: TypeAlias = Mapping[str, tuple[object, ...]]
"""By fields that are not declared: the values that ask for nothing."""


def shaped(wanted: str) -> WrapValidator:
    """For a field of several forms: one sentence that says what it must be, where Pydantic has a complaint per form."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"it must be {wanted}") from None

    return WrapValidator(check)


class RequestPart(BaseModel):
    """An object of a request: no field but the declared ones, no conversion between JSON types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    NEUTRAL: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        asking = {name: value for name, value in data.items() if value is not None and not cls._is_neutral(name, value)}
        unknown = [name for name in asking if name not in cls.model_fields]
        for name in unknown[1:]:  # one is enough for a refusal; an error for each of millions is not
            del asking[name]
        return asking

    @classmethod
    def _is_neutral(cls, name: str, value: object) -> bool:
        return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in cls.NEUTRAL.get(name, ()))


class StreamOptions(RequestPart):
    NEUTRAL: ClassVar[Neutral] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = Field(False, description="A last chunk, whose choices are empty, carries the usage.")


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    shaped(f"a text, or a list of at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_LENGTH} characters"),
]


class Sampling(RequestPart):
    """The fields that both text endpoints share."""

    NEUTRAL: ClassVar[Neutral] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "metadata": ({},),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "min_p": (0,),
        "min_tokens": (0,),
    }

    model: str
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="Another name for max_tokens.")
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stops = []
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="So many answers, each sampled on its own.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted and ignored.")
    top_k: int = Field(0, ge=-1, description="vLLM's: sample among the likeliest top_k tokens; 0 and -1 are no cut.")
    stop_token_ids: list[int] = Field(
        [], max_length=256, fail_fast=True, description="vLLM's: sampling one of these ends the answer; it is not shown."
    )
    ignore_eos: bool = Field(False, description="vLLM's: go on after the model has ended its answer.")
    return_token_ids: bool = Field(False, description="vLLM's: prompt_token_ids and token_ids in the answer.")

    @field_validator("max_completion_tokens")
    @classmethod
    def _agrees_with_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other not in (None, value):
            raise ValueError(f"it is {value} and max_tokens is {other}: give one of the two")
        return value

    @field_validator("stream_options")
    @classmethod
    def _goes_with_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("it needs stream to be true: leave it out")
        return value

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def sampling_params(self, choice: int, max_tokens: int | None, stop_token_ids: tuple[int, ...], top_logprobs: int) -> SamplingParams:
        """For answer number `choice` to a prompt. With a seed, every answer has one of its own, the first the seed itself."""
        seed = None if self.seed is None else (self.seed + choice * _SEED_STEP) % 2**63
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=seed,
            stop_token_ids=stop_token_ids,
            top_logprobs=top_logprobs,
        )
