"""One choice of a chat answer: from sampled tokens to reasoning, content and tool calls."""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perilune.model.assistant_builder import ArgumentsDelta, CallFinished, CallStarted, Event, ResponseDelta, ThinkDelta
from perilune.model.chat_format import MessageParser
from perilune.serve import generation
from perilune.serve.api.call_arguments import CallArguments
from perilune.serve.api.responses import FinishReason
from perilune.serve.api.stop_text import StopText
from perilune.serve.generation import SampledToken


@dataclass(frozen=True)
class CallPiece:
    """More of call `index`, which counts the calls shown, from 0. `id` and `name` are set in its first piece, `is_last` in its last:
    a call without one was cut off."""

    index: int
    id: str | None
    name: str | None
    arguments: str
    is_last: bool


@dataclass(frozen=True)
class ChatPiece:
    """What one token added; or, without a token, the end of the choice added."""

    token: SampledToken | None
    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish_reason: FinishReason | None = None


class ChatReader:
    """A `Reader` of the tokens after a chat prompt.

    Stop strings are looked for in the response alone. Without `may_call` the choice ends where the model begins a call, of which
    nothing is shown. Tokens of `unseen_ids`, and those from `vocab_size` on, which a model may have beyond its tokenizer, say nothing.

    A call that is whole but not well-formed is shown as the model wrote it, its arguments perhaps no JSON object: a client that
    answers it with an error lets the model try again. The finish_reason is `tool_calls` once there is a call that may be executed, also
    where the answer was cut off after it.
    """

    def __init__(self, parser: MessageParser, stops: Sequence[str], may_call: bool, vocab_size: int, unseen_ids: Collection[int]) -> None:
        self._parser, self._stop, self._may_call = parser, StopText(stops), may_call
        self._vocab_size, self._unseen_ids = vocab_size, frozenset(unseen_ids)
        self._calls: dict[int, _Call] = {}
        self._num_shown = 0
        self._can_execute = False
        self.is_over = False

    def push(self, token: SampledToken) -> ChatPiece:
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[CallPiece] = []
        is_seen = token.id < self._vocab_size and token.id not in self._unseen_ids
        for event in self._parser.push([token.id]) if is_seen else ():
            if self.is_over:
                break
            match event:
                case ResponseDelta(text):
                    content.append(self._stop.push(text))
                    self.is_over = self._stop.is_met
                case ThinkDelta(text):
                    reasoning.append(text)
                case CallStarted() | ArgumentsDelta() | CallFinished() if not self._may_call:
                    self.is_over = True
                case _:
                    calls += self._read_call(event)
            if not isinstance(event, ResponseDelta):
                content.append(self._stop.flush())  # the response was left: what follows belongs to another text
        return ChatPiece(token, "".join(reasoning), "".join(content), tuple(calls))

    def finish(self, reason: generation.FinishReason) -> ChatPiece:
        is_for_tools = self._can_execute and reason != "abort"
        return ChatPiece(None, content=self._stop.flush(), finish_reason="tool_calls" if is_for_tools else reason)

    def _read_call(self, event: Event) -> list[CallPiece]:
        match event:
            case CallStarted(index, name):
                self._calls[index] = _Call(name)
                return []
            case ArgumentsDelta(index=index, json_text=text):
                return self._show(self._calls[index], self._calls[index].arguments.push(text), is_last=False)
            case CallFinished(call):
                self._can_execute = self._can_execute or call.may_execute()
                return self._show(self._calls[call.index], self._calls[call.index].arguments.close(), is_last=True)
            case _:
                return []

    def _show(self, call: "_Call", arguments: str, is_last: bool) -> list[CallPiece]:
        if not arguments and not is_last:
            return []
        if call.shown_as is not None:
            return [CallPiece(call.shown_as, None, None, arguments, is_last)]
        call.shown_as = self._num_shown
        self._num_shown += 1
        return [CallPiece(call.shown_as, f"call_{secrets.token_hex(12)}", call.name, arguments, is_last)]


class _Call:
    def __init__(self, name: str) -> None:
        self.name = name
        self.arguments = CallArguments()
        self.shown_as: int | None = None
