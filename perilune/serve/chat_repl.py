"""`perilune chat`: talk to a model in a terminal.

The conversation is held as token ids. What the model sampled stays as it was sampled, and each turn adds only what
follows it, so that the prompt of a turn begins with the whole of the turn before it and the engine computes nothing twice.

An answer that is cut off (by Ctrl-C, by max_tokens, by a full context) stays in the conversation as far as it came, closed
by the format's own closing ids (`ChatFormat.closing_ids`); an answer stopped before its first token takes the user's message
back with it. There are no tools here: a call is shown as the model wrote it, and nothing is run.
"""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import get_args

from rich.console import Console

from perilune.errors import UserError
from perilune.model.assistant_builder import ArgumentsDelta, CallFinished, CallStarted, Event, ResponseDelta, ThinkDelta
from perilune.model.chat_format import ChatFormat, MessageParser, chat_format
from perilune.model.chat_messages import AssistantMessage, Effort, Message, SystemMessage, UserMessage
from perilune.model.vocabulary import Tokenizer
from perilune.serve.chat_screen import Screen
from perilune.serve.client.protocol import EngineClient
from perilune.serve.generation import EngineInfo, Finished, GenerationError, GenerationRequest, SampledToken, SamplingParams

PROMPT = "> "
HELP = """\
/reset                       start a new conversation
/effort low|high|max|none    how much the model thinks, from the next conversation on (it stands before the first message)
/help                        this list
/quit                        end; so do Ctrl-D, and Ctrl-C at the prompt
Ctrl-C during an answer stops it; what came so far stays in the conversation. A second Ctrl-C does not wait for the engine.
A message that begins with / needs a space before it."""

ReadLine = Callable[[str], str]
"""Shows the prompt it is given and returns a line without its end, like `input`: EOFError at the end of the input,
KeyboardInterrupt for Ctrl-C. It may block the event loop: nothing runs there while the user types."""


@dataclass(frozen=True)
class ChatOptions:
    """`system`: a system message before the conversation. `effort=None`: the model answers without thinking.

    `sampling`: its `stop_token_ids` are not used, for the chat format knows what ends a message.
    """

    system: str | None = None
    effort: Effort | None = "max"
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def thinking(self) -> bool:
        return self.effort is not None


def open_terminal() -> tuple[Console, ReadLine]:
    """This process's output and input: with a prompt, line editing and styles if stdin is a terminal, plain if it is not."""
    if not sys.stdin.isatty():
        return Console(color_system=None), _read_piped_line
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` line editing and history
    return Console(), _read_terminal_line


async def chat(
    client: EngineClient,
    tokenizer: Tokenizer,
    options: ChatOptions,
    console: Console,
    read_line: ReadLine,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Read lines and answer them until the input ends, /quit, or Ctrl-C at the prompt.

    What the engine refuses or fails to do is said in a sentence, and the conversation goes on as if the message had not been
    sent. `clock`: seconds, for the rate shown after each answer. The client stays open. Raises `UserError` if the vocabulary
    has no chat format, and what `EngineClient.info` raises.
    """
    repl = _Repl(client, chat_format(tokenizer), options, Screen(console), await client.info(), clock)
    repl.greet()
    while True:
        try:
            line = read_line(PROMPT)
        except (EOFError, KeyboardInterrupt):
            return
        if line.startswith("/"):
            if line.split()[0] == "/quit":
                return
            repl.command(line)
        elif line.strip():
            await repl.answer(line)


class _Conversation:
    """A conversation as ids and as messages, through the end of its last answer."""

    def __init__(self, form: ChatFormat, options: ChatOptions) -> None:
        self._form = form
        self._options = options
        self._messages: list[Message] = [SystemMessage(options.system)] if options.system is not None else []
        self.ids: list[int] = []
        """Empty until there was an answer."""

    @property
    def thinking(self) -> bool:
        return self._options.thinking

    def prompt_ids(self, message: UserMessage) -> list[int]:
        thinking = self.thinking
        if self.ids:
            return self.ids + self._form.continuation_ids([message], after=self._messages, thinking=thinking)
        return self._form.prompt_ids([*self._messages, message], effort=self._options.effort, thinking=thinking)

    def add(self, message: UserMessage, prompt_ids: list[int], sampled_ids: list[int], answer: AssistantMessage) -> None:
        closing = self._form.closing_ids(sampled_ids, thinking=self.thinking)
        self.ids = prompt_ids + sampled_ids + closing
        self._messages += [message, answer]


class _Repl:
    def __init__(
        self,
        client: EngineClient,
        form: ChatFormat,
        options: ChatOptions,
        screen: Screen,
        info: EngineInfo,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._form = form
        self._options = options
        self._screen = screen
        self._info = info
        self._clock = clock
        self._conversation = _Conversation(form, options)

    def greet(self) -> None:
        if self._screen.has_styles:
            self._screen.remark(f"{self._info.name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")

    # Commands.

    def command(self, line: str) -> None:
        match line.split():
            case ["/help"]:
                self._screen.remark(HELP)
            case ["/reset"]:
                self._conversation = _Conversation(self._form, self._options)
                self._screen.remark("a new conversation")
            case ["/effort", level]:
                self._set_effort(level)
            case ["/effort"]:
                self._screen.remark(f"effort is {self._options.effort or 'none'}: /effort low, high, max or none changes it")
            case [name, *_]:
                self._screen.remark(f"{name} is no command, or not in this form: /help lists them; put a space before a message")

    def _set_effort(self, level: str) -> None:
        efforts: dict[str, Effort | None] = {**{effort: effort for effort in get_args(Effort)}, "none": None}
        if level not in efforts:
            self._screen.remark(f"effort {level!r} is not one of low, high, max and none")
        elif not self._form.supports_thinking:
            self._screen.remark("this model has no think channel, so effort changes nothing")
        else:
            self._options = replace(self._options, effort=efforts[level])
            if self._conversation.ids:
                self._screen.remark(
                    f"effort {level} from the next conversation on, for it stands before the first message: /reset starts one"
                )
            else:
                self._conversation = _Conversation(self._form, self._options)
                self._screen.remark(f"effort {level}")

    # Answers.

    async def answer(self, line: str) -> None:
        message = UserMessage(line)
        try:
            prompt_ids = self._conversation.prompt_ids(message)
            if len(prompt_ids) >= self._info.max_length:
                self._say_full(len(prompt_ids))
                return
            sampling = replace(self._options.sampling, stop_token_ids=self._form.end_ids)
            answer = _Answer(self._form.parser(thinking=self._conversation.thinking), self._screen, self._clock)
            await _Stream(self._client, GenerationRequest(tuple(prompt_ids), sampling), answer).run()
        except (UserError, GenerationError) as error:
            self._screen.remark(f"{error} (your message was taken back)")
            return
        if not answer.ids:
            self._screen.remark("stopped before the first token: your message was taken back")
            return
        said = answer.finish()
        self._conversation.add(message, prompt_ids, answer.ids, said)
        self._say_how_it_ended(answer, said)

    def _say_full(self, num_tokens: int) -> None:
        limit = f"{num_tokens:,} tokens with your message, and the model reads {self._info.max_length:,} at most"
        if self._conversation.ids:
            self._screen.remark(f"the context is full ({limit}): /reset starts a new conversation")
        else:
            self._screen.remark(f"your message is too long ({limit}): send a shorter one")

    def _say_how_it_ended(self, answer: "_Answer", said: AssistantMessage) -> None:
        used = len(self._conversation.ids)
        match answer.reason:
            case "abort":
                self._screen.remark("stopped; what came so far stays in the conversation")
            case "length" if len(answer.ids) == self._options.sampling.max_tokens:
                self._screen.remark(f"cut off after max_tokens, {len(answer.ids):,}")
            case "length":
                self._screen.remark("cut off, the context is full: /reset starts a new conversation")
            case _:
                defects = [*said.defects, *(remark for call in said.tool_calls for remark in call.defects)]
                if defects:
                    self._screen.remark(f"not in the chat format: {'; '.join(defects)}")
                if said.tool_calls:
                    self._screen.remark("this chat has no tools: nothing was run")
        self._screen.remark(f"{answer.statistics()}, {used:,} of {self._info.max_length:,} in context")


class _Answer:
    """One answer while it comes: its ids, and its text shown on the screen."""

    def __init__(self, parser: MessageParser, screen: Screen, clock: Callable[[], float]) -> None:
        self._parser = parser
        self._screen = screen
        self._clock = clock
        self._channel: type[Event] | None = None
        self._first_time = self._last_time = 0.0
        self.ids: list[int] = []
        self.reason = "abort"
        """How it ended; someone stopped it if the engine does not say."""

    def take(self, token_id: int) -> None:
        """Raises `UserError` for an id outside the vocabulary."""
        events = self._parser.push([token_id])
        self._last_time = self._clock()
        if not self.ids:
            self._first_time = self._last_time
        self.ids.append(token_id)
        for event in events:
            self._show(event)

    def finish(self) -> AssistantMessage:
        self._screen.end_line()
        return self._parser.finish()

    def statistics(self) -> str:
        tokens = "1 token" if len(self.ids) == 1 else f"{len(self.ids):,} tokens"
        seconds = self._last_time - self._first_time
        # From the first token on: the time before it goes into reading the prompt.
        return f"{tokens}, {(len(self.ids) - 1) / seconds:.1f} tokens/s" if seconds > 0 else tokens

    def _show(self, event: Event) -> None:
        match event:
            case ThinkDelta(text):
                self._enter(ThinkDelta)
                self._screen.aside(text)
            case ResponseDelta(text):
                self._enter(ResponseDelta)
                self._screen.write(text)
            case CallStarted(index, name):
                self._enter(CallStarted)
                self._screen.end_line()
                self._screen.aside(f"call {index}: {name or '(no name)'} ")
            case ArgumentsDelta():
                self._screen.aside(event.json_text)
            case CallFinished():
                self._screen.end_line()

    def _enter(self, channel: type[Event]) -> None:
        """Set a channel apart from the one before it by an empty line."""
        if self._channel not in (None, channel):
            self._screen.end_line()
            self._screen.write("\n")
        self._channel = channel


class _Stream:
    """Feeds an answer from the engine. Ctrl-C has the engine end the request; a second one does not wait until it has."""

    def __init__(self, client: EngineClient, request: GenerationRequest, answer: _Answer) -> None:
        self._client = client
        self._request = request
        self._answer = answer
        self._reading: asyncio.Task[None] | None = None
        self._abort: asyncio.Task[None] | None = None
        self._is_left = False

    async def run(self) -> None:
        """Raises what the stream raises."""
        self._reading = asyncio.create_task(self._read())
        try:
            with _on_ctrl_c(self._interrupt):
                await self._reading
        except asyncio.CancelledError:
            if not self._is_left:
                raise
        finally:
            if self._abort is not None:
                self._abort.cancel()
                await asyncio.gather(self._abort, return_exceptions=True)

    async def _read(self) -> None:
        events = self._client.stream(self._request)
        try:
            async for event in events:
                match event:
                    case SampledToken():
                        self._answer.take(event.id)
                    case Finished():
                        self._answer.reason = event.reason
                        return
        finally:
            await _close(events)

    def _interrupt(self) -> None:
        if self._abort is None:
            self._abort = asyncio.create_task(self._client.abort([self._request.request_id]))
        elif self._reading is not None:
            self._is_left = True
            self._reading.cancel()


async def _close(events: AsyncIterator[SampledToken | Finished]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


@contextmanager
def _on_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """Have Ctrl-C do that on the event loop. Outside of the main thread, where no signal arrives, nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, previous)


def _read_piped_line(prompt: str) -> str:
    with _ctrl_c_raises():
        line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _read_terminal_line(prompt: str) -> str:
    try:
        with _ctrl_c_raises():
            return input(prompt)
    except (EOFError, KeyboardInterrupt):
        print()
        raise


@contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here: the event loop's own handler only notes it, and a blocking read would go on."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
