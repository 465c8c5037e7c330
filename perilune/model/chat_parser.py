"""From token ids back to messages: what the model sampled, while it samples it, or a whole conversation.

Structure comes from special token ids alone. Text that spells a control token is text; a control token id is structure
even where it makes no sense. No sequence of ids of the vocabulary makes the parsers raise.

Source: the inverse of `chat.py` (K3 technical report, arXiv 2607.24653, App. F; K3 chat template).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from perilune.errors import UserError
from perilune.model.assistant_builder import (
    ArgumentsDelta,
    AssistantBuilder,
    CallFinished,
    CallStarted,
    Event,
    MessageFinished,
    ResponseDelta,
    ThinkDelta,
)
from perilune.model.chat import NEW_TOOLS_INTRODUCTION, TOOLS_INTRODUCTION
from perilune.model.chat_messages import (
    AssistantMessage,
    Message,
    OptionMessage,
    SystemMessage,
    ToolDeclaration,
    ToolDeclarationMessage,
    ToolMessage,
    UserMessage,
)
from perilune.model.special_tokens import END_OF_MESSAGE, OPEN
from perilune.model.vocabulary import Tokenizer
from perilune.model.xtml import CloseTag, EndOfMessage, Item, OpenTag, Stray, Text, XtmlScanner

__all__ = [
    "ArgumentsDelta",
    "AssistantParser",
    "CallFinished",
    "CallStarted",
    "ConversationPart",
    "Event",
    "MessageFinished",
    "ResponseDelta",
    "StrayText",
    "ThinkDelta",
    "parse_conversation",
]


class AssistantParser:
    """Parses the ids sampled after a generation prefix, as they come.

    The deltas of each channel and argument join to what `finish()` returns, wherever the ids end (of an argument given
    twice, the last counts).
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool = True) -> None:
        """`thinking`: which generation prefix the ids follow. Raises `UserError` if the vocabulary is not of the K3 family."""
        self._scanner = XtmlScanner(tokenizer)
        self._builder = AssistantBuilder(("message", "think" if thinking else "response"))

    @property
    def is_finished(self) -> bool:
        """`<|end_of_msg|>` was read, or `finish` called; ids after that are not part of the message and are ignored."""
        return self._builder.is_finished

    def push(self, ids: Iterable[int]) -> list[Event]:
        """What the ids add. An unfinished character or tag is held back. Raises `UserError` for an id outside the vocabulary."""
        return [event for item in self._scanner.push(ids) for event in self._builder.feed(item)]

    def finish(self) -> AssistantMessage:
        """The message as far as it came; if it was cut off, its `defects` say so and a call cut off is `incomplete`.

        Bytes of a character cut off are dropped: no delta has shown them.
        """
        for item in self._scanner.finish():
            self._builder.feed(item)
        return self._builder.cut_off()


@dataclass(frozen=True)
class StrayText:
    """Something that is no message: text between messages, or a message of a role the format does not have."""

    text: str


@dataclass(frozen=True)
class ConversationPart:
    """A message and the ids it came from, `ids[start:end]`. `defects`: what was wrong with it, in words."""

    message: Message | StrayText
    start: int
    end: int
    defects: tuple[str, ...] = ()


def parse_conversation(ids: Iterable[int], tokenizer: Tokenizer) -> tuple[ConversationPart, ...]:
    """The messages of a whole conversation, with the options before and after it, for reports and debugging.

    The parts cover all ids. Rendering the messages again (with `effort=None`: the options are among them) gives the same
    ids if these were canonical. Raises `UserError` for an id outside the vocabulary or a vocabulary that is not of the K3 family.
    """
    reader = _ConversationReader()
    scanner = XtmlScanner(tokenizer)
    open_id = tokenizer.special_id(OPEN)
    position = tag_start = 0
    for position, token_id in enumerate(ids, start=1):
        if token_id == open_id:
            tag_start = position - 1
        for item in scanner.push([token_id]):
            reader.feed(item, tag_start, position)
    for item in scanner.finish():
        reader.feed(item, tag_start, position)
    reader.finish(position)
    return tuple(reader.parts)


class _ConversationReader:
    def __init__(self) -> None:
        self.parts: list[ConversationPart] = []
        self._start = 0
        self._header: OpenTag | None = None
        """The tag of the message being read, None between messages."""
        self._assistant: AssistantBuilder | None = None
        self._text: list[str] = []
        self._defects: list[str] = []
        self._is_closed = False

    def feed(self, item: Item, tag_start: int, position: int) -> None:
        """Take an item that ends before id `position`; `tag_start`: where the last opening tag began."""
        if isinstance(item, OpenTag) and item.tag == "message":
            self._end_part(tag_start, cut_off=self._header is not None)
            self._header = item
            self._assistant = AssistantBuilder() if item.attributes.get("role") == "assistant" else None
        elif self._assistant is not None:
            self._assistant.feed(item)
            if self._assistant.is_finished:
                self._end_part(position)
        else:
            self._feed_plain(item, position)

    def finish(self, position: int) -> None:
        self._end_part(position, cut_off=self._header is not None)

    def _feed_plain(self, item: Item, position: int) -> None:
        match item:
            case Text(text):
                self._text.append(text)
            case EndOfMessage() if self._header is not None:
                self._end_part(position, cut_off=not self._is_closed)
            case CloseTag("message") if self._header is not None and not self._is_closed:
                self._is_closed = True
            case EndOfMessage():
                self._text.append(END_OF_MESSAGE)
            case Stray(text):
                self._text.append(text)
                self._defects.append(f"{text} out of place")
            case OpenTag(tag) | CloseTag(tag):
                self._text.append(tag)
                self._defects.append(f"element {tag!r} out of place")

    def _end_part(self, position: int, cut_off: bool = False) -> None:
        if cut_off:
            self._defects.append("the message is cut off")
        message: Message | StrayText
        if self._assistant is not None:
            message = self._assistant.cut_off()
            self._defects = list(message.defects)
        elif self._header is None:
            message = StrayText("".join(self._text))
        else:
            message = self._plain_message(self._header, "".join(self._text))
        if position > self._start:
            self.parts.append(ConversationPart(message, self._start, position, tuple(self._defects)))
        self._start, self._header, self._assistant = position, None, None
        self._text, self._defects, self._is_closed = [], [], False

    def _plain_message(self, header: OpenTag, text: str) -> Message | StrayText:
        attributes = header.attributes
        match attributes.get("role"):
            case "user":
                return UserMessage(text, attributes.get("name"))
            case "system" if "type" not in attributes:
                return SystemMessage(text, attributes.get("name"))
            case "system":
                declared = _read_declaration(text) if attributes["type"] == "tool-declare" else None
                return declared or OptionMessage(attributes["type"], text)
            case "tool":
                try:
                    return ToolMessage(attributes.get("tool", ""), text, int(attributes.get("index", "")))
                except (ValueError, UserError):
                    self._defects.append(f"a tool result has index {attributes.get('index')!r}")
            case role:
                self._defects.append(f"a message has role {role!r}")
        return StrayText(text)


def _read_declaration(text: str) -> ToolDeclarationMessage | None:
    for introduction, extends in ((TOOLS_INTRODUCTION, False), (NEW_TOOLS_INTRODUCTION, True)):
        fenced = text.removeprefix(introduction)
        if fenced != text:
            try:
                entries: list[dict[str, Any]] = json.loads(fenced.removeprefix("```json\n").removesuffix("\n```"))
                functions = [entry["function"] for entry in entries]
                tools = [ToolDeclaration(f["name"], f.get("description", ""), f["parameters"]) for f in functions]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return None
            return ToolDeclarationMessage(tuple(tools), extends)
    return None
