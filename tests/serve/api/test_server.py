import errno
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from perilune.errors import UserError
from perilune.serve.api import server
from perilune.serve.api.server import bind, run_server
from tests.serve.api.fake_engine import NAME, FakeEngine, app_of, completion_ids, text_ids

BODY = {"model": NAME, "prompt": "Hi.", "stream": True}


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_port_in_use_is_said_with_its_remedy(taken_port: int) -> None:
    with pytest.raises(UserError) as caught:
        run_server(app_of(FakeEngine()), FakeEngine(), host="127.0.0.1", port=taken_port)
    assert str(caught.value) == f"port {taken_port} on 127.0.0.1 is in use: choose another with --port"


def test_a_port_that_another_server_has_bound_first_is_in_use() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(UserError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "port", "part"),
    [
        ("127.0.0.1", -1, "port -1 does not exist"),
        ("127.0.0.1", 65536, "port 65536 does not exist"),
        ("203.0.113.7", 8000, "203.0.113.7 is not an address of this machine"),
        ("no.such.name.invalid", 8000, "--host"),
        ("a" * 300, 8000, "--host"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_its_remedy(host: str, port: int, part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part)) as caught:
        bind(host, port)
    assert "choose" in str(caught.value)


def test_a_port_for_root_alone_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guarded(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(server.socket, "socket", Guarded)
    with pytest.raises(UserError, match="port 80 needs the rights of root: choose one from 1024 on"):
        bind("127.0.0.1", 80)


def test_an_ipv6_address_is_printed_in_brackets() -> None:
    try:
        listener = bind("::1", 0)
    except UserError:
        pytest.skip("no IPv6 here")
    with listener:
        assert re.fullmatch(r"http://\[::1\]:\d+", server.address(listener))


class Visit:
    """A user of a server that runs in the main thread: waits until it says where it is, then does something, then stops it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._said: Future[str] = Future()
        monkeypatch.setattr(server, "print", self._hear, raising=False)

    def _hear(self, text: str, flush: bool) -> None:
        assert flush
        self._said.set_result(text)

    def run(self, engine: FakeEngine, use: Callable[[str], None], grace: float = 3.0) -> str:
        """What the server said, once it has stopped and `use` has ended."""

        def visit() -> str:
            said = self._said.result(30)
            try:
                use(said.split(" at ")[1].split(" ")[0])
            except BaseException:
                os.kill(os.getpid(), signal.SIGINT)  # the server must not outlive a test that failed
                raise
            return said

        with ThreadPoolExecutor(1) as pool:
            visited = pool.submit(visit)
            run_server(app_of(engine), engine, port=0, grace=grace)
            return visited.result(30)


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch) -> Visit:
    return Visit(monkeypatch)


def stop(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_free_port_is_found_said_and_served_until_a_signal_and_the_engine_is_closed(visit: Visit, number: int) -> None:
    engine = FakeEngine(completion_ids("a"))

    def use(url: str) -> None:
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == NAME
        assert not engine.is_closed
        stop(number)

    said = visit.run(engine, use)
    assert re.fullmatch(rf"Serving {NAME} at http://127\.0\.0\.1:[1-9]\d* \(Ctrl-C stops it\)", said)
    assert engine.is_closed


def test_an_open_answer_may_end_after_the_signal(visit: Visit) -> None:
    engine = FakeEngine(completion_ids("one two"), pause_at=3)
    texts: list[str] = []

    def use(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            stop()
            wait_until_refused(url)
            engine.release()
            texts.extend(lines)

    visit.run(engine, use, grace=60)
    assert any('"finish_reason":"stop"' in line for line in texts) and texts[-2] == "data: [DONE]"
    assert engine.left == []


def wait_until_refused(url: str) -> None:
    """Until the server takes no more connections."""
    host, port = url.removeprefix("http://").split(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except ConnectionError:
            return


@pytest.mark.parametrize(("grace", "signals"), [(0.0, 1), (600.0, 2)])
def test_answers_that_would_not_end_are_ended_after_the_grace_or_at_a_second_signal(visit: Visit, grace: float, signals: int) -> None:
    engine = FakeEngine(text_ids("one two"), pause_at=3)
    texts: list[str] = []

    def use(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            for _ in range(signals):
                stop()
                wait_until_refused(url)
            texts.extend(lines)

    visit.run(engine, use, grace)
    assert any('"finish_reason":"abort"' in line for line in texts) and texts[-2] == "data: [DONE]"
    assert engine.is_closed


class Stuck(FakeEngine):
    async def close(self) -> None:
        self.is_closed = True
        await self.go_on.wait()


def test_neither_a_client_that_does_not_read_nor_an_engine_that_does_not_end_keeps_the_server(
    visit: Visit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(server, "_LAST_SECONDS", 0.01)
    engine = Stuck(max_length=10**9)
    connections: list[socket.socket] = []

    def use(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)))
        connections.append(connection)
        content = b'{"model": "moon", "prompt": "a", "max_tokens": 100000000, "logprobs": 5, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        connection.recv(100)
        stop()

    visit.run(engine, use, grace=0.0)
    connections[0].close()
    assert "left behind" in caplog.text and "cut" in caplog.text
    assert engine.left == [engine.requests[0].request_id]
