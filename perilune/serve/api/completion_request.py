"""The body of POST /v1/completions."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from perilune.serve.api.requests import Neutral, Sampling, shaped
from perilune.serve.generation import MAX_TOP_LOGPROBS

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
"""The OpenAI API's."""


def _as_list(value: object) -> object:
    """A single prompt as a list of one."""
    is_ids = isinstance(value, list) and len(value) > 0 and not isinstance(value[0], (str, list))
    return [value] if isinstance(value, str) or is_ids else value


_Texts = Annotated[list[str], Field(fail_fast=True)]
_IdLists = Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
Prompts = Annotated[
    _Texts | _IdLists,
    Field(min_length=1, max_length=MAX_PROMPTS),
    BeforeValidator(_as_list),
    shaped(f"a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of the one or the other"),
]


class CompletionRequest(Sampling):
    """A text prompt is plain text: no special token is read in it and none is put before it. `logprobs`: how many of the likeliest
    tokens to name beside each sampled one."""

    NEUTRAL: ClassVar[Neutral] = {**Sampling.NEUTRAL, "best_of": (1,), "echo": (False,), "suffix": ("",)}

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
