"""What the text endpoints answer, in the OpenAI API's form.

A field typed `Absent` is left out of the JSON where it is None; any other None is a null. Extensions: `reasoning_content`; vLLM's
`prompt_token_ids` and `token_ids`; finish_reason `abort` for an answer that the operator of the server ended early.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, TypeVar

from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")
Absent = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "abort"]


class ResponsePart(BaseModel):
    model_config = ConfigDict(frozen=True)


def json_answer(answer: ResponsePart) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


class Usage(ResponsePart):
    """`completion_tokens`: all that were sampled, thinking, markup and end tokens included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=prompt_tokens + completion_tokens)


class TopLogprob(ResponsePart):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponsePart):
    """One entry per token of `usage.completion_tokens`, markup included."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(ResponsePart):
    name: str
    arguments: str


class ToolCall(ResponsePart):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatAnswerMessage(ResponsePart):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: Absent[str] = None
    tool_calls: Absent[list[ToolCall]] = None


class ChatChoice(ResponsePart):
    index: int
    message: ChatAnswerMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None
    token_ids: Absent[list[int]] = None


class ChatCompletion(ResponsePart):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Absent[list[int]] = None


class FunctionDelta(ResponsePart):
    name: Absent[str] = None
    arguments: str


class ToolCallDelta(ResponsePart):
    """`id`, `type` and the function's name come with the first delta of call `index`."""

    index: int
    id: Absent[str] = None
    type: Absent[Literal["function"]] = None
    function: FunctionDelta


class Delta(ResponsePart):
    role: Absent[Literal["assistant"]] = None
    content: Absent[str] = None
    reasoning_content: Absent[str] = None
    tool_calls: Absent[list[ToolCallDelta]] = None


class ChatChunkChoice(ResponsePart):
    index: int
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None
    token_ids: Absent[list[int]] = None


class ChatChunk(ResponsePart):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Absent[Usage] = None
    prompt_token_ids: Absent[list[int]] = None


class CompletionLogprobs(ResponsePart):
    """One entry per token in each list. `text_offset`: where the token's text begins in the answer, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[Mapping[str, float]]
    text_offset: list[int]


class CompletionChoice(ResponsePart):
    """Of an answer, or of a chunk of one, where `finish_reason` is null but in the last."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None
    prompt_token_ids: Absent[list[int]] = None
    token_ids: Absent[list[int]] = None


class Completion(ResponsePart):
    """An answer, or a chunk of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Absent[Usage] = None


class Model(ResponsePart):
    """`max_model_len` (vLLM's): the longest sequence in tokens, prompt included. `weight_version`: of the weights in use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    weight_version: int


class ModelList(ResponsePart):
    object: Literal["list"]
    data: list[Model]
