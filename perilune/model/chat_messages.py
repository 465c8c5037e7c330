"""The messages of a conversation, as the chat encoder takes them and the parser gives them back.

All plain data. Text is never interpreted: whatever it spells, it reaches the model as text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from perilune.errors import UserError
from perilune.model.json_text import JsonValue, split_json_object

Effort = Literal["low", "high", "max"]
ToolChoice = Literal["auto", "required", "none"]


@dataclass(frozen=True)
class ToolDeclaration:
    """A tool the model may call. `parameters` is a JSON Schema object."""

    name: str
    description: str
    parameters: Mapping[str, JsonValue]


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool.

    `arguments`: by key, or the JSON text of the arguments as the OpenAI API carries it. The text of an object is rendered
    member by member with every value as spelled; any other text is malformed and is shown to the model as it is.
    `index`: 1-based place among the calls of its message, which `AssistantMessage` sets.
    `incomplete`: the model was cut off or broke off inside the call; it must not be executed.
    `defects`: what the parser found wrong with the call, in words; empty for what people write.
    """

    name: str
    arguments: Mapping[str, JsonValue] | str = field(default_factory=dict)
    index: int = 0
    incomplete: bool = False
    defects: tuple[str, ...] = ()

    @property
    def malformed(self) -> bool:
        """The call does not follow the format, or its arguments are not an object."""
        return bool(self.defects) or self.members() is None

    def may_execute(self) -> bool:
        """Whole and well-formed. A harness may choose to run a malformed call; an incomplete one never."""
        return not self.incomplete and not self.malformed

    def members(self) -> Mapping[str, tuple[JsonValue, str | None]] | None:
        """The arguments by key, with the literal JSON text of each if it is known; None if they are malformed text."""
        if not isinstance(self.arguments, str):
            return {key: (value, None) for key, value in self.arguments.items()}
        if not self.arguments.strip():  # the OpenAI API's way to say "no arguments"
            return {}
        return split_json_object(self.arguments)


@dataclass(frozen=True)
class SystemMessage:
    content: str
    name: str | None = None


@dataclass(frozen=True)
class UserMessage:
    content: str
    name: str | None = None


@dataclass(frozen=True)
class AssistantMessage:
    """What the model said. Its tool calls are numbered 1, 2, … in the order given, whatever index they come with.

    `defects`: what the parser found wrong outside the calls (cut off, a channel left open, …); empty for what people write.
    `learn`: supervised fine-tuning trains on this message; no part of what was said.
    """

    response: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    defects: tuple[str, ...] = ()
    learn: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        numbered = tuple(replace(call, index=index) for index, call in enumerate(self.tool_calls, start=1))
        object.__setattr__(self, "tool_calls", numbered)


@dataclass(frozen=True)
class ToolMessage:
    """The result of call number `index` of the assistant message before it."""

    tool: str
    content: str
    index: int

    def __post_init__(self) -> None:
        if self.index < 1:
            raise UserError(f"a tool result has index {self.index}: give it the index of its call, 1 for the first")


@dataclass(frozen=True)
class ToolDeclarationMessage:
    """Declares tools. `extends`: it adds to tools declared before it, in the middle of a conversation."""

    tools: tuple[ToolDeclaration, ...]
    extends: bool = True


@dataclass(frozen=True)
class OptionMessage:
    """A typed system message by which the system sets an option (thinking-effort, tool-choice, response-format)."""

    kind: str
    content: str


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage | ToolDeclarationMessage | OptionMessage
