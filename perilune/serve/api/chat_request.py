"""The body of POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from perilune.model.chat_messages import Effort
from perilune.serve.api.requests import Neutral, RequestPart, Sampling
from perilune.serve.generation import MAX_TOP_LOGPROBS

MAX_MESSAGES = 16384
MAX_PARTS = 4096
MAX_TOOLS = 1024


class TextPart(RequestPart):
    """A part of a message's content."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if value != "text":
            raise ValueError(f"the model reads text alone: leave out this part, which is {_quoted(value)}, or say it in words")
        return value


def _quoted(value: object) -> str:
    return repr(value if isinstance(value, str) else type(value).__name__)[:80]


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("it must be a text or a list of parts")
    return value


class FunctionCall(RequestPart):
    name: str
    arguments: str


class MessageToolCall(RequestPart):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestPart):
    """A message of any role; which fields a role has is checked where messages are read (`conversation.py`)."""

    NEUTRAL: ClassVar[Neutral] = {"annotations": ([],)}  # what an answer carries comes back in the next request

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True), BeforeValidator(_as_parts)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


class FunctionDeclaration(RequestPart):
    NEUTRAL: ClassVar[Neutral] = {"strict": (False,)}

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}}, description="A JSON Schema.")


class Tool(RequestPart):
    type: Literal["function"]
    function: FunctionDeclaration


class ChatRequest(Sampling):
    """`max_tokens` is that of the whole answer, thinking and markup included; without it an answer may fill the engine's longest
    sequence."""

    NEUTRAL: ClassVar[Neutral] = {
        **Sampling.NEUTRAL,
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "functions": ([],),
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Tool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["auto", "none"] = "auto"
    reasoning_effort: Effort | Literal["none"] = Field("max", description="none: the model does not think before it answers.")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _can_be_kept(cls, value: object) -> object:
        if value not in ("auto", "none"):
            raise ValueError("a call cannot be forced on the model: use auto or none")
        return value

    @field_validator("reasoning_effort", mode="before")
    @classmethod
    def _is_known(cls, value: object) -> object:
        if value not in ("low", "high", "max", "none"):
            raise ValueError(f"{_quoted(value)} is not an effort of this model: use low, high, max, or none for no thinking")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _goes_with_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs to be true")
        return value

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"
