"""One interface over both chat formats, in token ids: K3's, and that of Kimi K2 and Kimi Linear.

What serving and agents need from a format: the prompt of a conversation, what follows a conversation that is held as ids,
a parser for what the model samples, and how to close a message that was cut off. A sampled turn is never encoded again:

    ids = prompt_ids(messages)                      the model samples `turn`
    ids += turn + closing_ids(turn)                 closing_ids is empty when the model ended its message
    ids += continuation_ids(new, after=messages + [parsed turn])

The formats differ in what they can say. K2 has no think channel, no thinking effort, no tool choice and no response format.
Thinking and effort are wishes and are left out there; a tool choice or response format is a promise to whoever set it, so
that K2 cannot keep it is an error.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from perilune.errors import UserError
from perilune.model.assistant_builder import Event
from perilune.model.chat import ResponseFormat, render, render_continuation
from perilune.model.chat_closing import k3_closing_ids
from perilune.model.chat_k2 import render_k2, render_k2_continuation
from perilune.model.chat_k2_parser import K2Parser
from perilune.model.chat_messages import AssistantMessage, Effort, Message, ToolChoice, ToolDeclaration
from perilune.model.chat_parser import AssistantParser
from perilune.model.special_tokens import CLOSE, END_OF_MESSAGE, K2_OFFSETS, OPEN, SEP
from perilune.model.vocabulary import Tokenizer


class MessageParser(Protocol):
    """Parses the ids sampled after a generation prefix, as they come. No ids of the vocabulary make it raise."""

    @property
    def is_finished(self) -> bool:
        """The token that ends a message was read, or `finish` called; ids after that are ignored."""

    def push(self, ids: Iterable[int]) -> list[Event]:
        """What the ids add. Raises `UserError` for an id outside the vocabulary."""

    def finish(self) -> AssistantMessage:
        """The message as far as it came; if it was cut off, its `defects` say so and a call cut off is `incomplete`."""


class ChatFormat(Protocol):
    """How conversations of one family of vocabularies are written. Get one from `chat_format`."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Sampling one of these ends a message: the format's own end, and [EOS] for a model that goes astray.

        After an [EOS], which stays where it was sampled, the message counts as cut off.
        """

    @property
    def supports_thinking(self) -> bool:
        """Whether there is a think channel. Where there is none, `thinking` changes nothing."""

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDeclaration] = (),
        *,
        effort: Effort | None = "max",
        thinking: bool = True,
        tool_choice: ToolChoice | None = None,
        response_format: ResponseFormat | None = None,
    ) -> list[int]:
        """The whole prompt for the next assistant message, through the generation prefix.

        Raises `UserError` for a message, tool choice or response format this format cannot say.
        """

    def continuation_ids(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[Message] = (),
        thinking: bool = True,
        tool_choice: ToolChoice | None = None,
        response_format: ResponseFormat | None = None,
    ) -> list[int]:
        """What follows a conversation held as ids, its last message ended: `messages`, then the next generation prefix.

        `after`: the messages of that conversation, sampled ones as parsed. They are not written, only their calls are
        counted: K2 numbers calls through the whole conversation. Raises `UserError` as `prompt_ids` does.
        """

    def closing_ids(self, sampled_ids: Iterable[int], *, thinking: bool = True) -> list[int]:
        """What must follow a message cut off after `sampled_ids` for the conversation to go on; empty if it was ended.

        Every element still open is closed the way the format closes it. A call that was cut off then reads like a whole
        one, so what may be executed is decided by the message parsed from `sampled_ids` alone.
        """

    def parser(self, *, thinking: bool = True) -> MessageParser:
        """A parser for one message. `thinking` as it was given for the prompt."""


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The format of the vocabulary's family. Raises `UserError` if it has the special tokens of neither."""
    names = set(tokenizer.special_names)
    if names >= {OPEN, CLOSE, SEP, END_OF_MESSAGE}:
        return _K3Format(tokenizer)
    if names >= K2_OFFSETS.keys():
        return _K2Format(tokenizer)
    raise UserError(
        "this vocabulary has the special tokens of neither chat format, K3's (<|open|> …) nor that of K2 and Kimi Linear (<|im_user|> …): "
        "use the tokenizer files that came with the model"
    )


class _K3Format:
    supports_thinking = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end_ids = (tokenizer.special_id(END_OF_MESSAGE), tokenizer.eos_id)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDeclaration] = (),
        *,
        effort: Effort | None = "max",
        thinking: bool = True,
        tool_choice: ToolChoice | None = None,
        response_format: ResponseFormat | None = None,
    ) -> list[int]:
        return self._tokenizer.encode(render(messages, tools, effort, tool_choice, response_format, thinking))

    def continuation_ids(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[Message] = (),
        thinking: bool = True,
        tool_choice: ToolChoice | None = None,
        response_format: ResponseFormat | None = None,
    ) -> list[int]:
        return self._tokenizer.encode(render_continuation(messages, tool_choice, response_format, thinking))

    def closing_ids(self, sampled_ids: Iterable[int], *, thinking: bool = True) -> list[int]:
        return k3_closing_ids(list(sampled_ids), self._tokenizer, thinking)

    def parser(self, *, thinking: bool = True) -> MessageParser:
        return AssistantParser(self._tokenizer, thinking)


class _K2Format:
    supports_thinking = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end_ids = (tokenizer.special_id("<|im_end|>"), tokenizer.eos_id)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDeclaration] = (),
        *,
        effort: Effort | None = "max",
        thinking: bool = True,
        tool_choice: ToolChoice | None = None,
        response_format: ResponseFormat | None = None,
    ) -> list[int]:
        _refuse_options(tool_choice, response_format)
        return self._tokenizer.encode(render_k2(messages, tools))

    def continuation_ids(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[Message] = (),
        thinking: bool = True,
        tool_choice: ToolChoice | None = None,
        response_format: ResponseFormat | None = None,
    ) -> list[int]:
        _refuse_options(tool_choice, response_format)
        return self._tokenizer.encode(render_k2_continuation(messages, after))

    def closing_ids(self, sampled_ids: Iterable[int], *, thinking: bool = True) -> list[int]:
        parser = K2Parser(self._tokenizer)
        parser.push(sampled_ids)
        return parser.closing_ids()

    def parser(self, *, thinking: bool = True) -> MessageParser:
        return K2Parser(self._tokenizer)


def _refuse_options(tool_choice: ToolChoice | None, response_format: ResponseFormat | None) -> None:
    if tool_choice not in (None, "auto"):
        raise UserError(f"the K2 chat format has no way to say tool choice {tool_choice!r}: use auto, or a K3 model")
    if response_format is not None:
        raise UserError("the K2 chat format has no way to ask for a response format: ask for it in a message, or use a K3 model")
