"""Builds an assistant message from the tags and text of its markup, item by item, and tells what is new for streaming.

A model may write anything. The builder never raises: it closes what was left open, ignores what has no place, keeps
every readable piece, and notes each departure in `defects`. A call that was not closed in order is `incomplete`.
"""

from dataclasses import dataclass
from typing import TypeAlias

from perilune.model.chat_messages import AssistantMessage, ToolCall
from perilune.model.json_text import JsonValue, compact_json, json_string_piece, json_type, parse_json
from perilune.model.xtml import CloseTag, EndOfMessage, Item, OpenTag, Stray, Text


@dataclass(frozen=True)
class ThinkDelta:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True)
class ResponseDelta:
    """More text of the response channel."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """Call number `index` (1-based) of tool `name` begins; `name` is empty if the model gave none."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the arguments of call `index`.

    `text`: raw text of the argument `key` (None: of a block of malformed arguments, or of none).
    `json_text`: more of the arguments as one JSON object, the way the OpenAI API streams them. Text arguments stream; any
    other value comes when it is complete, spelled as the model spelled it. All pieces of a finished call join to its
    `CallFinished.arguments_json`.
    """

    index: int
    key: str | None
    text: str
    json_text: str


@dataclass(frozen=True)
class CallFinished:
    """The call was closed. `arguments_json` given back as `ToolCall.arguments` renders to the text the model wrote."""

    call: ToolCall
    arguments_json: str


@dataclass(frozen=True)
class MessageFinished:
    """`<|end_of_msg|>` was read."""

    message: AssistantMessage


Event: TypeAlias = ThinkDelta | ResponseDelta | CallStarted | ArgumentsDelta | CallFinished | MessageFinished

_PARENT = {"think": "message", "response": "message", "tools": "message", "call": "tools", "argument": "call", "json": "call"}
# An element without a place is kept on the stack under a marked name: its text is ignored until it is closed.
_IGNORED = "!"
_MAX_DEFECTS = 16


class Defects:
    """Distinct remarks in order, bounded however long the nonsense."""

    def __init__(self) -> None:
        self._remarks: dict[str, None] = {}

    def add(self, remark: str) -> None:
        if len(self._remarks) < _MAX_DEFECTS:
            self._remarks[remark if len(remark) <= 100 else remark[:99] + "…"] = None

    def all(self) -> tuple[str, ...]:
        return tuple(self._remarks)


class _CallBuilder:
    """One call: typed arguments, or else one block of malformed arguments."""

    def __init__(self, index: int, tag: OpenTag) -> None:
        self.index = index
        self.name = tag.attributes.get("tool", "")
        self.incomplete = False
        self.defects = Defects()
        self.arguments: dict[str, JsonValue] = {}
        self._block: list[str] | None = None
        self._key = ""
        self._type = ""
        self._text: list[str] = []
        self._json: list[str] = []
        if not self.name:
            self.defects.add("the call names no tool")
        if tag.attributes.get("index") != str(index):
            self.defects.add(f"call {index} has index {tag.attributes.get('index')!r}")

    def open(self, tag: OpenTag) -> list[Event] | None:
        """Begin an argument or the malformed block; None if it has no place here (a block beside arguments)."""
        if self._block is not None or (tag.tag == "json" and self.arguments):
            self.defects.add(f"{tag.tag} beside a block of arguments")
            return None
        if tag.tag == "json":
            self._block = []
            return []
        self._key, self._type, self._text = tag.attributes.get("key", ""), tag.attributes.get("type", ""), []
        if "key" not in tag.attributes:
            self.defects.add("an argument without a key")
        if self._key in self.arguments:
            self.defects.add(f"argument {self._key!r} twice")
        separator = "," if self.arguments else "{"
        quote = '"' if self._type == "string" else ""
        self.arguments[self._key] = ""
        return [self._delta("", separator + compact_json(self._key) + ":" + quote)]

    def take_text(self, text: str) -> list[Event]:
        if self._block is not None:
            self._block.append(text)
            return [self._delta(text, text)]
        self._text.append(text)
        return [self._delta(text, json_string_piece(text) if self._type == "string" else "")]

    def close_element(self) -> list[Event]:
        """End the argument or block that is open."""
        if self._block is not None:
            return []
        text = "".join(self._text)
        self.arguments[self._key], literal = self._read_value(text)
        return [self._delta("", literal)]

    def abandon_element(self) -> None:
        """The argument or block that is open was cut off: keep its text as it stands."""
        if self._block is None:
            self.arguments[self._key] = "".join(self._text)

    def close(self) -> list[Event]:
        events: list[Event] = []
        if self._block is None:
            events.append(ArgumentsDelta(self.index, None, "", self._note_json("}" if self.arguments else "{}")))
        return [*events, CallFinished(self.build(), "".join(self._json))]

    def build(self) -> ToolCall:
        arguments = dict(self.arguments) if self._block is None else "".join(self._block)
        return ToolCall(self.name, arguments, self.index, self.incomplete, self.defects.all())

    def _read_value(self, text: str) -> tuple[JsonValue, str]:
        """The value of the open argument, and the JSON text that completes it."""
        if self._type == "string":
            return text, '"'
        try:
            value = parse_json(text)
            fits = json_type(value) == self._type != "string"
        except ValueError:
            fits = False
        if fits:
            return value, text.strip()
        self.defects.add(f"argument {self._key!r} is not the {self._type or 'typed value'} it should be")
        return text, compact_json(text)

    def _delta(self, text: str, json_text: str) -> ArgumentsDelta:
        return ArgumentsDelta(self.index, self._key if self._block is None else None, text, self._note_json(json_text))

    def _note_json(self, json_text: str) -> str:
        self._json.append(json_text)
        return json_text


class AssistantBuilder:
    """Takes markup items of one assistant message, from the point where `open_elements` are already open."""

    def __init__(self, open_elements: tuple[str, ...] = ("message",)) -> None:
        self._stack = list(open_elements)
        self._seen = set(open_elements)
        self._thinking: list[str] = []
        self._response: list[str] = []
        self._calls: list[_CallBuilder] = []
        self._defects = Defects()
        self.is_finished = False

    def feed(self, item: Item) -> list[Event]:
        """What `item` adds. Items after `<|end_of_msg|>` add nothing."""
        if self.is_finished:
            return []
        match item:
            case Text(text):
                return self._take_text(text)
            case OpenTag():
                return self._open(item)
            case CloseTag(tag):
                return self._close(tag)
            case Stray(text):
                self._note(f"{text} out of place")
                return []
            case EndOfMessage():
                self._close_down_to(0)
                if "response" not in self._seen:
                    self._defects.add("no response channel")
                self.is_finished = True
                return [MessageFinished(self.build())]

    def cut_off(self) -> AssistantMessage:
        """The message as far as it came; what is still open stays incomplete."""
        if not self.is_finished:
            self._close_down_to(0)
            self._defects.add("ended before <|end_of_msg|>")
            self.is_finished = True
        return self.build()

    def build(self) -> AssistantMessage:
        calls = tuple(call.build() for call in self._calls)
        return AssistantMessage("".join(self._response), "".join(self._thinking), calls, self._defects.all())

    def _take_text(self, text: str) -> list[Event]:
        match self._stack[-1] if self._stack else None:
            case "think":
                self._thinking.append(text)
                return [ThinkDelta(text)]
            case "response":
                self._response.append(text)
                return [ResponseDelta(text)]
            case "argument" | "json":
                return self._calls[-1].take_text(text)
        self._note("text outside the channels")
        return []

    def _note(self, remark: str) -> None:
        """Hold the departure against the call it happened in, which must not be executed then, or else against the message."""
        (self._calls[-1].defects if "call" in self._stack else self._defects).add(remark)

    def _open(self, tag: OpenTag) -> list[Event]:
        name = tag.tag
        if not tag.well_formed:
            self._note(f"unreadable tag <|open|>{name}")
        parent = _PARENT.get(name)
        if parent == "tools" and "tools" not in self._stack and "message" in self._stack:
            self._defects.add("a call outside the tools channel")
            self._close_down_to(self._stack.index("message") + 1)
            self._stack.append("tools")
        if parent is None or parent not in self._stack:
            self._note(f"element {name!r} out of place")
            self._stack.append(_IGNORED + name)
            return []
        self._close_down_to(self._stack.index(parent) + 1)
        if parent == "message":
            if name in self._seen:
                self._defects.add(f"channel {name} twice")
            self._seen.add(name)
        elif parent == "tools":
            self._calls.append(_CallBuilder(len(self._calls) + 1, tag))
            self._stack.append(name)
            return [CallStarted(self._calls[-1].index, self._calls[-1].name)]
        else:
            events = self._calls[-1].open(tag)
            self._stack.append(name if events is not None else _IGNORED + name)
            return events or []
        self._stack.append(name)
        return []

    def _close(self, tag: str) -> list[Event]:
        depth = next((i for i in reversed(range(len(self._stack))) if self._stack[i].removeprefix(_IGNORED) == tag), None)
        if depth is None:
            self._note(f"element {tag!r} closed but not open")
            return []
        self._close_down_to(depth + 1)
        element = self._stack.pop()
        if element in ("argument", "json"):
            return self._calls[-1].close_element()
        if element == "call" and not self._calls[-1].incomplete:
            return self._calls[-1].close()
        return []

    def _close_down_to(self, depth: int) -> None:
        """Close, without their closing tags, the elements from `depth` of the stack on."""
        while len(self._stack) > depth:
            element = self._stack.pop()
            self._defects.add(f"element {element.removeprefix(_IGNORED)!r} left open")
            if element in ("argument", "json"):
                self._calls[-1].abandon_element()
                self._calls[-1].incomplete = True
            elif element == "call":
                self._calls[-1].incomplete = True
