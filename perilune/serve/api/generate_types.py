"""What the token endpoint and the control endpoints read and write: both the server and `client/http.py` use these.

The shapes are vLLM's of `/inference/v1/generate`. Fields that this engine has nothing for may be there with the value that
changes nothing; with any other they are refused by name, because a request half obeyed gives wrong training data.
"""

import base64
import io
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import BeforeValidator, Field, FiniteFloat
from torch import Tensor

from perilune.serve.api.requests import RequestPart, StreamOptions
from perilune.serve.api.responses import ResponsePart, Usage
from perilune.serve.generation import MAX_TOP_LOGPROBS, FinishReason

_INT64 = 2**63 - 1
_EITHER = (True, False)


def _refuse_stop_strings(_: object) -> None:
    raise ValueError("stop strings are not supported here, where no text is made: give the ids to stop at in stop_token_ids")


class SamplingFields(RequestPart):
    """`max_tokens` absent or null: until the engine's longest sequence is full. `top_k` 0 or -1: no cut. `logprobs`: how many of
    the likeliest tokens each sampled one is reported with; the sampled token's own is always there."""

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "n": (1,),
        "best_of": (1,),
        "min_p": (0,),
        "min_tokens": (0,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "bad_words": ([],),
        "stop": ([],),
        "extra_args": ({},),
        "flat_logprobs": (False,),
        # These are about text, and no text is made here.
        "detokenize": _EITHER,
        "include_stop_str_in_output": _EITHER,
        "skip_special_tokens": _EITHER,
        "spaces_between_special_tokens": _EITHER,
    }

    max_tokens: int | None = Field(default=None, ge=1, le=_INT64)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(default=0, ge=-1, le=_INT64)
    # Not negative: elsewhere -1 asks for a random seed, and a group of equal answers is a costly misunderstanding.
    seed: int | None = Field(default=None, ge=0, le=_INT64)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=256, fail_fast=True)
    ignore_eos: bool = False
    logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    stop: Annotated[None, BeforeValidator(_refuse_stop_strings)] = None


class GenerateBody(RequestPart):
    """Body of POST /inference/v1/generate: continue `token_ids`.

    `cache_salt` keeps a cache from being shared between requests of different salts: accepted, since nothing is shared.
    """

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {"priority": (0,), "return_token_ids": _EITHER}

    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingFields = SamplingFields()
    model: str | None = None
    request_id: str | None = Field(default=None, pattern=r"^[!-~]{1,200}$")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_routed_experts: bool = False
    cache_salt: str | None = Field(default=None, max_length=1000)


class AbortBody(RequestPart):
    """Body of POST /abort_requests."""

    request_ids: list[str]


class TopLogprob(ResponsePart):
    token: str
    logprob: FiniteFloat
    bytes: None = None


class TokenLogprob(TopLogprob):
    """A sampled token as `token_id:123`, with its log-probability under softmax(logits)."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponsePart):
    content: list[TokenLogprob]


class GenerateChoice(ResponsePart):
    """All tokens, or in a stream those since the last event; then `finish_reason` is null but in the last.

    `routed_experts`: see `encode_experts`. `weight_versions`: of the weights that gave each token.
    """

    index: int = 0
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: ChoiceLogprobs
    routed_experts: str | None
    weight_versions: list[int]


class GenerateResponse(ResponsePart):
    """`weight_version`: of the last token, or of the engine when there is none."""

    request_id: str
    model: str
    choices: list[GenerateChoice]
    prompt_token_ids: list[int]
    weight_version: int
    usage: Usage


class GenerateChunk(ResponsePart):
    """One event of a stream. The last may have `usage` and no choice."""

    request_id: str
    model: str
    choices: list[GenerateChoice]
    usage: Usage | None = None


class EngineFacts(ResponsePart):
    """Answer of GET /get_weight_version: the version, and what else a client must know of an engine before it sends a request."""

    weight_version: int
    model: str
    max_model_len: int
    vocab_size: int


class WeightVersion(ResponsePart):
    weight_version: int


def encode_experts(experts: Tensor) -> str:
    """Base64 of the `.npy` file of [positions, moe_layers, top_k] expert ids, as uint8 where they fit and else uint16.

    Raises ValueError for ids that uint16 cannot hold.
    """
    ids = experts.cpu().numpy()
    low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    if low < 0 or high > np.iinfo(np.uint16).max:
        raise ValueError(f"expert ids go from {low} to {high}: the format holds 0 to {np.iinfo(np.uint16).max}")
    file = io.BytesIO()
    np.save(file, ids.astype(np.uint8 if high <= np.iinfo(np.uint8).max else np.uint16), allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


def decode_experts(text: str) -> Tensor:
    """int64 [positions, moe_layers, top_k] out of what `encode_experts` made. Raises ValueError for anything else."""
    # Not np.load, which also opens archives and pickles, and raises whatever those raise.
    array = np.lib.format.read_array(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    if array.dtype not in (np.uint8, np.uint16) or array.ndim != 3:
        raise ValueError("routed_experts must be a .npy file of uint8 or uint16 [positions, moe_layers, top_k]")
    return torch.from_numpy(array.astype(np.int64))
