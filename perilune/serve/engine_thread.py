"""EngineThread: an engine at work in a thread of its own, and the post between it and event loops."""

import asyncio
import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from perilune.serve.engine import Engine, EngineEvent
from perilune.serve.generation import EngineInfo, Finished, GenerationError, GenerationRequest, SampledToken

logger = logging.getLogger(__name__)
Content = SampledToken | Finished | GenerationError
_EXIT_SECONDS = 30.0
"""How long a process that ends waits for the step at work: torch in a thread does not survive the interpreter."""


class Mailbox:
    """Where the events of one request go: a queue on its caller's event loop. Made on that loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Content] = asyncio.Queue()


class EngineThread:
    """Runs an engine until `stop`. Other threads `post` commands, which it carries out between two steps, in order.

    Nothing that goes wrong in a step or a command ends it: the requests concerned get a GenerationError.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mailboxes: dict[str, Mailbox] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopped = False
        self._ended: Future[None] = Future()
        self.info: EngineInfo = engine.info()
        """As of the last step."""
        self._thread = threading.Thread(target=self._run, name="perilune-engine", daemon=True)
        self._thread.start()
        atexit.register(self._stop_and_wait)

    # Called from anywhere.

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def post(self, command: Callable[[], None]) -> bool:
        """Whether the thread will do it: not after it was stopped."""
        with self._wake:
            if self._is_stopped:
                return False
            self._commands.append(command)
            self._wake.notify()
        return True

    def stop(self) -> "Future[None]":
        """End after the step at work, all requests with reason `abort`. The result is there when it has."""
        with self._wake:
            self._is_stopped = True
            self._wake.notify()
        return self._ended

    def _stop_and_wait(self) -> None:
        self.stop()
        self._thread.join(_EXIT_SECONDS)

    # Commands: called on the engine's thread.

    def add(self, request: GenerationRequest, mailbox: Mailbox) -> None:
        """Raises what `Engine.add` raises."""
        self._engine.add(request)
        self._mailboxes[request.request_id] = mailbox

    def abort(self, request_ids: list[str]) -> None:
        self._deliver(self._engine.abort(request_ids))

    def give_up(self, request_id: str, mailbox: Mailbox) -> None:
        """The caller is gone: end its request, unless the id belongs to another's by now."""
        if self._mailboxes.get(request_id) is mailbox:
            del self._mailboxes[request_id]
            self.abort([request_id])

    def with_engine(self, work: Callable[[Engine], None]) -> None:
        """Something that may change what `info` says."""
        work(self._engine)
        self.info = self._engine.info()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self.abort(list(self._mailboxes))
        finally:
            atexit.unregister(self._stop_and_wait)
            self._ended.set_result(None)

    def _turn(self) -> bool:
        """Wait for something to do and do it; False once stopped."""
        with self._wake:
            while not (self._commands or self._engine.has_work or self._is_stopped):
                self._wake.wait()
            commands, is_stopped = list(self._commands), self._is_stopped
            self._commands.clear()
        try:
            for command in commands:
                command()
            if is_stopped:
                return False
            self._deliver(self._engine.step())
        except Exception as error:
            logger.exception("an engine step failed")
            self._fail_all(f"the engine failed in the step it was computing ({error}): send the request again")
        return True

    def _fail_all(self, reason: str) -> None:
        self._deliver(self._engine.fail_all(reason))
        # Whoever still waits would wait for ever.
        self._deliver([EngineEvent(request_id, GenerationError(reason)) for request_id in self._mailboxes])

    def _deliver(self, events: list[EngineEvent]) -> None:
        """Hand the events of a step to their loops, each loop woken once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Content]]] = {}
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is None:
                continue
            by_loop.setdefault(mailbox.loop, []).append((mailbox, event.content))
            if not isinstance(event.content, SampledToken):
                del self._mailboxes[event.request_id]
        for loop, posts in by_loop.items():
            if not on_loop(loop, partial(_put_all, posts)):
                gone = [request_id for request_id, mailbox in self._mailboxes.items() if mailbox.loop is loop]
                for request_id in gone:
                    del self._mailboxes[request_id]
                self._engine.abort(gone)


def _put_all(posts: list[tuple[Mailbox, Content]]) -> None:
    for mailbox, content in posts:
        mailbox.queue.put_nowait(content)


def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> bool:
    """Have the loop call it; False when the loop is closed, and nobody waits there any more."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return False
    return True
