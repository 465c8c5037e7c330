import asyncio
import io
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from perilune.model.chat_format import chat_format
from perilune.model.chat_messages import AssistantMessage, SystemMessage, UserMessage
from perilune.model.chat_parser import parse_conversation
from perilune.model.decoder import Decoder
from perilune.model.tokenizer import KIMI_K2, BpeTokenizer, ByteTokenizer, Segment, TiktokenTokenizer, Tokenizer
from perilune.serve.chat_repl import ChatOptions, chat, open_terminal
from perilune.serve.client.in_process import InProcessClient
from perilune.serve.engine import EngineSettings
from perilune.serve.generation import (
    EngineBusyError,
    EngineInfo,
    Finished,
    FinishReason,
    Generation,
    GenerationError,
    GenerationRequest,
    SampledToken,
    SamplingParams,
)
from tests.model.conversations import GOLDEN
from tests.model.tiny_models import k3_config, random_model

BYTES = ByteTokenizer()
BPE = BpeTokenizer.train([GOLDEN.replace("<|", " ").replace("|>", " ")] * 3, 420)
K2 = TiktokenTokenizer({bytes([byte]): byte for byte in range(256)}, KIMI_K2)
CTRL_C = "ctrl-c"
Step = int | Exception | str


class ScriptedClient:
    """An engine that says what it is told: one list of steps per request.

    A step is a token id, an error, CTRL_C (the signal arrives here, and the engine waits until it is asked to abort), or the
    reason why the answer ends ("stop" without one).
    """

    def __init__(self, *answers: Iterable[Step], max_length: int = 10_000, abort_works: bool = True) -> None:
        self.answers = [list(steps) for steps in answers]
        self.requests: list[GenerationRequest] = []
        self.num_closed = 0
        self._max_length = max_length
        self._abort_works = abort_works
        self._aborted: dict[str, asyncio.Event] = {}

    async def stream(self, request: GenerationRequest) -> AsyncIterator[SampledToken | Finished]:
        self.requests.append(request)
        aborted = self._aborted[request.request_id] = asyncio.Event()
        reason: FinishReason = "stop"
        try:
            for step in self.answers.pop(0):
                match step:
                    case int():
                        yield SampledToken(step, -1.0, 0)
                    case "length":
                        reason = "length"
                    case "ctrl-c" | "ctrl-c twice":
                        signal.raise_signal(signal.SIGINT)
                        if step == "ctrl-c twice":
                            signal.raise_signal(signal.SIGINT)
                        await aborted.wait()
                        reason = "abort"
                        break
                    case Exception():
                        raise step
            yield Finished(reason)
        finally:
            self.num_closed += 1

    async def generate(self, request: GenerationRequest) -> Generation:
        raise NotImplementedError

    async def abort(self, request_ids: Collection[str]) -> None:
        if not self._abort_works:
            await asyncio.Event().wait()
        for request_id in request_ids:
            self._aborted[request_id].set()

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        raise NotImplementedError

    async def info(self) -> EngineInfo:
        return EngineInfo("scripted", self._max_length, 0, 0)

    async def close(self) -> None:
        raise NotImplementedError


def ids_of(markup: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return tokenizer.encode([Segment(markup, allow_special=True)])


def says(response: str, thinking: str = "", tools: str = "") -> list[int]:
    """The ids of a whole K3 answer."""
    tools = f"<|open|>tools<|sep|>{tools}<|close|>tools<|sep|>" if tools else ""
    return ids_of(
        f"{thinking}<|close|>think<|sep|><|open|>response<|sep|>{response}<|close|>response<|sep|>{tools}<|close|>message<|sep|><|end_of_msg|>"
    )


def reader(lines: Iterable[str | BaseException]) -> Callable[[str], str]:
    left = iter(lines)

    def read_line(prompt: str) -> str:
        match next(left, None):
            case None:
                raise EOFError
            case str(line):
                return line
            case error:
                raise error

    return read_line


def talk(
    client: ScriptedClient | InProcessClient,
    *lines: str | BaseException,
    tokenizer: Tokenizer = BYTES,
    options: ChatOptions = ChatOptions(),  # noqa: B008
    styled: bool = False,
) -> str:
    """What is on the screen after these lines were typed. Every look at the clock is half a second later."""
    times = iter(range(10**9))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system="truecolor", width=20) if styled else Console(file=screen, width=20)
    asyncio.run(chat(client, tokenizer, options, console, reader(lines), clock=lambda: next(times) / 2))
    return screen.getvalue()


def check_prompts_grow(client: ScriptedClient, answers: list[list[int]]) -> None:
    for earlier, later, answer in zip(client.requests, client.requests[1:], answers, strict=False):
        held = [*earlier.prompt_ids, *answer]
        assert list(later.prompt_ids[: len(held)]) == held


def test_an_answer_is_shown_as_plain_text_where_there_are_no_styles() -> None:
    answer = says("Hello!\nBye.", "hm\nso")
    client = ScriptedClient(answer)
    shown = talk(client, "Hi")
    used = len(client.requests[0].prompt_ids) + len(answer)
    assert shown == f"~ hm\n~ so\n\nHello!\nBye.\n~ {len(answer)} tokens, 2.0 tokens/s, {used} of 10,000 in context\n"


def test_thinking_and_statistics_are_dimmed_on_a_terminal_and_the_response_is_not() -> None:
    shown = talk(ScriptedClient(says("ok", "hm")), "Hi", styled=True)
    assert "\x1b[2mh\x1b[0m\x1b[2mm\x1b[0m\n\nok\n\x1b[2m" in shown
    assert "scripted: /help" in shown
    assert "~" not in shown


def test_the_request_stops_at_the_ends_of_the_format_and_samples_as_it_was_told() -> None:
    client = ScriptedClient(says("ok"))
    talk(client, "Hi", options=ChatOptions("Be brief.", "low", sampling=SamplingParams(7, temperature=0.5, stop_token_ids=(1,))))
    [request] = client.requests
    assert request.sampling == SamplingParams(7, temperature=0.5, stop_token_ids=chat_format(BYTES).end_ids)
    assert list(request.prompt_ids) == chat_format(BYTES).prompt_ids([SystemMessage("Be brief."), UserMessage("Hi")], effort="low")


@pytest.mark.parametrize("tokenizer", [BPE, K2], ids=["k3", "k2"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_prompt_begins_with_the_prompt_before_it_and_the_ids_that_were_sampled(tokenizer: Tokenizer, data: st.DataObject) -> None:
    anything = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=12)
    answers = data.draw(st.lists(anything, min_size=2, max_size=3))
    ends = data.draw(st.lists(st.sampled_from(["stop", "length", CTRL_C]), min_size=len(answers), max_size=len(answers)))
    client = ScriptedClient(*([*ids, end] for ids, end in zip(answers, ends, strict=True)))
    talk(client, *["ä?"] * len(answers), tokenizer=tokenizer)
    assert len(client.requests) == len(answers)
    check_prompts_grow(client, answers)


def test_a_long_conversation_reads_as_its_messages() -> None:
    answers = [says("one", "a"), says("two", "b")]
    client = ScriptedClient(*answers, says("three"))
    talk(client, "1", "", "2", "  ", "3", options=ChatOptions("sys"))
    check_prompts_grow(client, answers)
    _effort, *messages, prefix = parse_conversation(client.requests[-1].prompt_ids, BYTES)
    assert [part.message for part in messages] == [
        SystemMessage("sys"),
        UserMessage("1"),
        AssistantMessage("one", "a"),
        UserMessage("2"),
        AssistantMessage("two", "b"),
        UserMessage("3"),
    ]
    assert not any(part.defects for part in messages)
    assert prefix.message == AssistantMessage(defects=prefix.defects)


@pytest.mark.parametrize("end", [CTRL_C, "length"])
def test_an_answer_cut_off_stays_in_the_conversation_as_a_message_that_was_ended(end: str) -> None:
    cut = ids_of("I was thin")
    client = ScriptedClient([*cut, end], says("ok"))
    shown = talk(client, "1", "2", options=ChatOptions(sampling=SamplingParams(max_tokens=len(cut))))
    assert ("~ stopped" if end == CTRL_C else f"~ cut off after max_tokens, {len(cut)}\n") in shown
    check_prompts_grow(client, [cut])
    parts = parse_conversation(client.requests[1].prompt_ids, BYTES)[1:-1]
    assert [part.message for part in parts] == [UserMessage("1"), AssistantMessage("", "I was thin"), UserMessage("2")]
    assert not any(part.defects for part in parts)


def test_ctrl_c_before_the_first_token_takes_the_message_back() -> None:
    client = ScriptedClient([CTRL_C], says("ok"))
    assert "stopped before the first token: your message was taken back" in talk(client, "1", "2")
    assert list(client.requests[1].prompt_ids) == chat_format(BYTES).prompt_ids([UserMessage("2")])


def test_a_second_ctrl_c_does_not_wait_for_an_engine_that_does_not_abort() -> None:
    client = ScriptedClient([*ids_of("hm"), "ctrl-c twice"], says("ok"), abort_works=False)
    assert "~ stopped" in talk(client, "1", "2")
    check_prompts_grow(client, [ids_of("hm")])
    assert client.num_closed == 2


def test_ctrl_c_means_again_what_it_meant_after_an_answer() -> None:
    before = signal.getsignal(signal.SIGINT)
    during = []

    def read_line(prompt: str) -> str:
        during.append(signal.getsignal(signal.SIGINT))
        if len(during) == 1:
            return "Hi"
        raise EOFError

    asyncio.run(chat(ScriptedClient([*ids_of("a"), CTRL_C]), BYTES, ChatOptions(), Console(file=io.StringIO()), read_line))
    assert during[0] == during[1]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("end", [EOFError(), KeyboardInterrupt(), "/quit"])
def test_the_chat_ends_at_the_prompt(end: str | BaseException) -> None:
    client = ScriptedClient()
    talk(client, end, "never sent")
    assert client.requests == []


@pytest.mark.parametrize(
    "error",
    [EngineBusyError("too many requests wait: try again later"), GenerationError("the engine failed: send the request again")],
)
def test_an_engine_that_fails_is_a_sentence_and_the_message_is_taken_back(error: Exception) -> None:
    client = ScriptedClient([*ids_of("half"), error], says("ok"))
    assert f"~ half\n~ {error} (your message was taken back)\n" in talk(client, "1", "2")
    assert list(client.requests[1].prompt_ids) == chat_format(BYTES).prompt_ids([UserMessage("2")])
    assert client.num_closed == 2


def test_what_cannot_be_encoded_or_decoded_is_a_sentence() -> None:
    client = ScriptedClient([BYTES.vocab_size], says("ok"))
    shown = talk(client, "a\udcff", "b", "c")
    assert "lone surrogate '\\udcff'" in shown
    assert f"token id {BYTES.vocab_size} is outside" in shown
    assert len(client.requests) == 2


def test_a_full_context_is_a_sentence_that_names_the_way_out() -> None:
    first = len(chat_format(BYTES).prompt_ids([UserMessage("1")]))
    client = ScriptedClient([*ids_of("x" * 20), "length"], says("ok"), max_length=first + 20)
    shown = talk(client, "1", "2", "/reset", "3", "y" * 100)
    assert "cut off, the context is full: /reset starts a new conversation" in shown
    assert "at most): /reset starts a new conversation" in shown
    assert len(client.requests) == 2
    assert list(client.requests[1].prompt_ids) == chat_format(BYTES).prompt_ids([UserMessage("3")])
    assert "your message is too long" in talk(ScriptedClient(max_length=30), "1")


def test_reset_starts_a_conversation_with_the_system_message_alone() -> None:
    client = ScriptedClient(says("ok"), says("ok"))
    talk(client, "1", "/reset", "2", options=ChatOptions("sys"))
    assert list(client.requests[1].prompt_ids) == chat_format(BYTES).prompt_ids([SystemMessage("sys"), UserMessage("2")])


INSTRUCT_OK = ids_of("ok<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>")


def test_effort_waits_for_the_next_conversation() -> None:
    form = chat_format(BYTES)
    client = ScriptedClient(says("ok"), says("ok", "still thinking"), INSTRUCT_OK)
    shown = talk(client, "/effort low", "1", "/effort none", "2", "/reset", "3", "/effort", "/effort medium")
    assert "~ effort low\n" in shown
    assert "effort none from the next conversation on" in shown
    assert "effort is none" in shown
    assert "'medium' is not one of low, high, max and none" in shown
    assert list(client.requests[0].prompt_ids) == form.prompt_ids([UserMessage("1")], effort="low")
    check_prompts_grow(client, [says("ok")])
    assert list(client.requests[2].prompt_ids) == form.prompt_ids([UserMessage("3")], effort=None, thinking=False)
    assert "~ still thinking\n" in shown


def test_effort_of_a_model_without_a_think_channel_changes_nothing_and_says_so() -> None:
    assert "changes nothing" in talk(ScriptedClient(), "/effort low", tokenizer=K2)


def test_commands_are_never_sent() -> None:
    client = ScriptedClient(says("ok"))
    shown = talk(client, "/help", "/etc/hosts is what?", "/reset now", "/", " /etc/hosts is what?")
    assert "/effort low|high|max|none" in shown
    assert "/etc/hosts is no command" in shown
    assert "/reset is no command, or not in this form" in shown
    assert list(client.requests[0].prompt_ids) == chat_format(BYTES).prompt_ids([UserMessage(" /etc/hosts is what?")])


CALL = (
    '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Bonn<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
)


def test_tool_calls_are_shown_and_not_run() -> None:
    shown = talk(ScriptedClient(says("Let me see.", tools=CALL)), "Hi")
    assert shown.startswith(
        'Let me see.\n\n~ call 1: weather {"city":"Bonn"}\n~ call 2: now {}\n~ this chat has no tools: nothing was run\n'
    )


def test_a_call_is_shown_in_k2_as_well() -> None:
    markup = (
        "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
    )
    assert talk(ScriptedClient(ids_of(markup, K2)), "Hi", tokenizer=K2).startswith("Look.\n\n~ call 1: f {}\n~ this chat has no tools")


def test_an_answer_that_breaks_the_format_says_so() -> None:
    shown = talk(ScriptedClient(ids_of("hm[EOS]")), "Hi")
    assert "~ not in the chat format: [EOS] out of place" in shown


def test_instruct_mode_has_no_thinking() -> None:
    client = ScriptedClient(INSTRUCT_OK)
    assert talk(client, "Hi", options=ChatOptions(effort=None)).startswith("ok\n~")
    assert BYTES.decode(client.requests[0].prompt_ids).endswith("<|open|>response<|sep|>")


@pytest.mark.parametrize("styled", [True, False])
def test_what_the_model_samples_cannot_drive_the_terminal(styled: bool) -> None:
    attack = "\x1b]0;title\x07\x1b[2J\x9b1m\r\b\x7f\u202e[bold]x[/bold] :smile: \x00"
    tools = (
        f'<|open|>call tool="{attack}" index="1"<|sep|><|open|>json type="object"<|sep|>{attack}<|close|>json<|sep|><|close|>call<|sep|>'
    )
    shown = talk(ScriptedClient(says(attack, attack, tools)), "Hi", styled=styled)
    for style in ("\x1b[2m", "\x1b[0m"):
        shown = shown.replace(style, "")
    assert not any((character < " " and character != "\n") or "\x7f" <= character < "\xa0" or character == "\u202e" for character in shown)
    assert shown.count(r"\x1b]0;title\x07\x1b[2J\x9b1m\r\x08\x7f\u202e[bold]x[/bold] :smile: \x00") == 4


def test_tabs_and_long_lines_reach_the_screen_as_they_are() -> None:
    long = "x" * 50 + "\t|"
    assert f"{long}\n" in talk(ScriptedClient(says(long)), "Hi")


def test_piped_lines_are_read_without_a_prompt_and_shown_without_styles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    console, read_line = open_terminal()
    client = ScriptedClient(says("1", "a"), says("2", "b"))
    asyncio.run(chat(client, BYTES, ChatOptions(), console, read_line))
    shown = capsys.readouterr().out
    assert shown.startswith("~ a\n\n1\n~ ")
    assert "\x1b" not in shown
    assert "> " not in shown
    assert len(client.requests) == 2


class InterruptedClient(InProcessClient):
    """Ctrl-C arrives at the third token of every answer."""

    def __init__(self, model: Decoder, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self.prompts: list[tuple[int, ...]] = []

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampledToken | Finished]:
        self.prompts.append(request.prompt_ids)
        num_tokens = 0
        async for event in super().stream(request):
            num_tokens += 1
            if num_tokens == 3:
                signal.raise_signal(signal.SIGINT)
            yield event


def test_a_real_engine_stops_and_goes_on() -> None:
    model = random_model(k3_config(vocab_size=BYTES.vocab_size), torch.float32)
    # Text alone, so that the random network does not end an answer by itself.
    with torch.no_grad():
        model.lm_head.weight[BYTES.num_text_tokens :] = 0
        model.lm_head.weight[: BYTES.num_text_tokens] *= 100

    async def run() -> tuple[str, list[tuple[int, ...]]]:
        client = InterruptedClient(model, EngineSettings(max_sequences=1, max_length=2048, prefill_tokens=64))
        screen = io.StringIO()
        await chat(client, BYTES, ChatOptions(), Console(file=screen), reader(["Hi", "Go on", "x" * 3000]))
        await client.close()
        return screen.getvalue(), client.prompts

    shown, prompts = asyncio.run(run())
    assert shown.count("~ stopped") == 2
    assert "the context is full" in shown
    first, second = prompts
    assert second[: len(first)] == first


TERMINAL_PROGRAM = """
import asyncio
import signal
from perilune.model.tokenizer import ByteTokenizer
from perilune.serve.chat_repl import ChatOptions, chat, open_terminal
from perilune.serve.generation import EngineInfo, Finished, SampledToken

class Endless:
    def __init__(self):
        self.aborted = asyncio.Event()
    async def info(self):
        return EngineInfo("endless", 10_000, 268, 0)
    async def abort(self, request_ids):
        self.aborted.set()
    async def stream(self, request):
        for byte in b"thinking":
            yield SampledToken(byte, -1.0, 0)
        await self.aborted.wait()
        yield Finished("abort")

async def main():
    await chat(Endless(), ByteTokenizer(), ChatOptions(), *open_terminal())
    print("ended")
    signal.signal(signal.SIGINT, signal.SIG_IGN)

asyncio.run(main())
"""


def test_on_a_terminal_ctrl_c_stops_an_answer_and_ends_the_chat_at_the_prompt() -> None:
    controller, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", TERMINAL_PROGRAM],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # the first terminal that a session opens is its own
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(terminal)
    shown = b""

    def wait_for(text: bytes, press: bytes = b"") -> None:
        """Read until `text` comes. `press` is pressed until then: a Ctrl-C just before `input` begins to wait is lost on it."""
        nonlocal shown
        while text not in shown:
            os.write(controller, press)
            while text not in shown and (not press or select.select([controller], [], [], 2)[0]):
                shown += os.read(controller, 1024)
        shown = shown[shown.index(text) + len(text) :]

    try:
        wait_for(b"> ")
        os.write(controller, b"Hi\n")
        wait_for(b"g\x1b[0m")
        os.write(controller, b"\x03")
        wait_for(b"stopped")
        wait_for(b"> ")
        wait_for(b"ended", press=b"\x03")
        assert child.wait() == 0
    finally:
        child.kill()
        child.wait()
        os.close(controller)
