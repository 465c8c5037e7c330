"""How the rest of the house reaches an engine: one protocol, in this process and over HTTP."""

from perilune.serve.client.http import HttpClient
from perilune.serve.client.in_process import InProcessClient
from perilune.serve.client.protocol import EngineClient
from perilune.serve.engine import EngineSettings
from perilune.serve.generation import (
    MAX_TOP_LOGPROBS,
    EngineBusyError,
    EngineInfo,
    Finished,
    FinishReason,
    Generation,
    GenerationError,
    GenerationRequest,
    SampledToken,
    SamplingParams,
    new_request_id,
)

__all__ = [
    "MAX_TOP_LOGPROBS",
    "EngineBusyError",
    "EngineClient",
    "EngineInfo",
    "EngineSettings",
    "FinishReason",
    "Finished",
    "Generation",
    "GenerationError",
    "GenerationRequest",
    "HttpClient",
    "InProcessClient",
    "SampledToken",
    "SamplingParams",
    "new_request_id",
]
