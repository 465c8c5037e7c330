"""What a Kimi K2 or Kimi Linear model sampled, from token ids back to a message, while it samples it.

    text <|tool_calls_section_begin|>
    (<|tool_call_begin|> functions.NAME:NUMBER <|tool_call_argument_begin|> JSON <|tool_call_end|>)*
    <|tool_calls_section_end|> <|im_end|>

Structure comes from special token ids alone: text that spells a marker is text, and a marker's id is never text. No
sequence of ids of the vocabulary makes the parser raise; what breaks the format is noted in `defects`, and everything
that can be read is kept.

A call's arguments stay the JSON text that the model wrote, spelling and all, so that a message renders to the ids it came
from (`chat_k2.render_k2`). NUMBER counts through the whole conversation; the parser numbers the calls of its message 1, 2, …
and only checks that the numbers the model wrote follow one another.

Source: the inverse of `chat_k2.py` (K2 chat template).
"""

from collections.abc import Iterable
from typing import Literal

from perilune.model.assistant_builder import (
    ArgumentsDelta,
    CallFinished,
    CallStarted,
    Defects,
    Event,
    MessageFinished,
    ResponseDelta,
)
from perilune.model.chat_messages import AssistantMessage, ToolCall
from perilune.model.vocabulary import StreamDecoder, Tokenizer

_PREFIX = "functions."
_MARKERS = (
    "<|im_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


class K2Parser:
    """Parses the ids sampled after a K2 generation prefix, as they come.

    Yields the events of `AssistantParser`. Arguments come as one text: an `ArgumentsDelta` has no `key`, and its `text` and
    `json_text` are the same. The deltas join to what `finish()` returns, wherever the ids end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `UserError` if the vocabulary is not of the K2 family."""
        for name in _MARKERS:
            tokenizer.special_id(name)
        self._tokenizer = tokenizer
        self._text = StreamDecoder(tokenizer)
        self._place: Literal["response", "section", "header", "arguments"] = "response"
        self._response: list[str] = []
        self._call = _Call()
        """The call being read, in `header` and `arguments`; in `_calls` from its arguments on."""
        self._calls: list[_Call] = []
        self._first_number: int | None = None
        self._has_section = False
        self._defects = Defects()
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """`<|im_end|>` was read, or `finish` called; ids after that are not part of the message and are ignored."""
        return self._is_finished

    def push(self, ids: Iterable[int]) -> list[Event]:
        """What the ids add. An unfinished character is held back. Raises `UserError` for an id outside the vocabulary."""
        events: list[Event] = []
        for token_id in ids:
            marker = self._tokenizer.special_name(token_id)
            if self._is_finished:
                continue
            if marker is None:
                events += self._take_text(self._text.push(token_id))
            else:
                events += self._take_text(self._text.finish())
                events += self._take_marker(marker)
        return events

    def finish(self) -> AssistantMessage:
        """The message as far as it came; if it was cut off, its `defects` say so and a call cut off is `incomplete`.

        Bytes of a character cut off are dropped: no delta has shown them. So is a call cut off in its name.
        """
        if not self._is_finished:
            self._leave_section()
            self._defects.add("ended before <|im_end|>")
            self._is_finished = True
        return self._build()

    def closing_ids(self) -> list[int]:
        """The ids that close what is open after what was read, so that a conversation can go on; none once it is finished."""
        open_call = ["<|tool_call_end|>", "<|tool_calls_section_end|>"]
        markers = {
            "response": [],
            "section": open_call[1:],
            "header": ["<|tool_call_argument_begin|>", *open_call],
            "arguments": open_call,
        }
        return [] if self._is_finished else [self._tokenizer.special_id(name) for name in (*markers[self._place], "<|im_end|>")]

    def _take_text(self, text: str) -> list[Event]:
        if not text:
            return []
        match self._place:
            case "response":
                if self._has_section and not text.isspace():
                    self._defects.add("text after the calls")
                self._response.append(text)
                return [ResponseDelta(text)]
            case "section":
                if not text.isspace():
                    self._defects.add("text between the calls")
                return []
            case "header":
                self._call.header.append(text)
                return []
            case "arguments":
                self._call.arguments.append(text)
                return [ArgumentsDelta(self._call.index, None, text, text)]

    def _take_marker(self, marker: str) -> list[Event]:
        match marker, self._place:
            case "<|im_end|>", _:
                self._leave_section()
                self._is_finished = True
                return [MessageFinished(self._build())]
            case "<|tool_calls_section_begin|>", "response":
                if self._has_section:
                    self._defects.add("a second section of calls")
                self._has_section, self._place = True, "section"
            case "<|tool_call_begin|>", _:
                if self._place == "response":
                    self._defects.add("a call outside the section of calls")
                self._leave_call()
                self._has_section, self._place, self._call = True, "header", _Call()
            case "<|tool_call_argument_begin|>", "header":
                return self._start_call()
            case "<|tool_call_end|>", "header":
                self._call.defects.add("the call has no arguments")
                return [*self._start_call(), *self._finish_call()]
            case "<|tool_call_end|>", "arguments":
                return self._finish_call()
            case "<|tool_calls_section_end|>", "section" | "header" | "arguments":
                self._leave_call()
                self._place = "response"
            case _, "header" | "arguments":
                self._call.defects.add(f"{marker} out of place")
            case _:
                self._defects.add(f"{marker} out of place")
        return []

    def _start_call(self) -> list[Event]:
        call = self._call
        self._calls.append(call)
        self._place = "arguments"
        number = call.read_header(index=len(self._calls))
        if number is not None:
            if self._first_number is None:
                self._first_number = number - (call.index - 1)
            if number != self._first_number + call.index - 1:
                call.defects.add(f"call {call.index} has number {number}")
        return [CallStarted(call.index, call.name)]

    def _finish_call(self) -> list[Event]:
        self._place = "section"
        call = self._call.build()
        return [CallFinished(call, str(call.arguments))]

    def _leave_call(self) -> None:
        """End the call that is open, if one is, without its end marker."""
        if self._place == "header":
            self._defects.add("a call left open in its name")
        elif self._place == "arguments":
            self._defects.add("a call left open")
            self._call.incomplete = True

    def _leave_section(self) -> None:
        """End the message, and what is open in it without its end marker."""
        self._leave_call()
        if self._place != "response":
            self._defects.add("the section of calls left open")
        self._place = "response"

    def _build(self) -> AssistantMessage:
        return AssistantMessage("".join(self._response), "", tuple(call.build() for call in self._calls), self._defects.all())


class _Call:
    def __init__(self) -> None:
        self.header: list[str] = []
        self.index = 0
        self.name = ""
        self.arguments: list[str] = []
        self.incomplete = False
        self.defects = Defects()

    def read_header(self, index: int) -> int | None:
        """Take the header as it stands for that of the message's call `index`; returns the number the model gave, if any."""
        self.index = index
        identity = "".join(self.header).strip()
        if not identity.startswith(_PREFIX):
            self.defects.add(f"the call does not begin with {_PREFIX}")
        self.name = identity.removeprefix(_PREFIX)
        name, _, digits = self.name.rpartition(":")
        # Nine digits count more calls than any conversation holds.
        number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 9 else None
        if number is None or str(number) != digits:
            self.defects.add("the call has no number")
            number = None
        else:
            self.name = name
        if not self.name:
            self.defects.add("the call names no tool")
        return number

    def build(self) -> ToolCall:
        return ToolCall(self.name, "".join(self.arguments), self.index, self.incomplete, self.defects.all())
