"""Serving an app over HTTP from start to stop. The socket is bound here, so that what is wrong with the address is said in a sentence."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Coroutine, Iterator

import uvicorn
from fastapi import FastAPI

from perilune.errors import UserError
from perilune.serve.client.protocol import EngineClient

logger = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
"""How long the engine has to end its step when the server stops."""
_LAST_SECONDS = 2.0
"""How long clients have to read what their answers end with."""


def run_server(app: FastAPI, client: EngineClient, *, host: str = "127.0.0.1", port: int = 8000, grace: float = 3.0) -> None:
    """Serve `app` until Ctrl-C or SIGTERM, then close `client`. Port 0: a free one. The address is printed once requests are taken.

    Told to stop, it takes no more requests; answers that are not complete after `grace` seconds end with finish_reason `abort`. A
    second signal does not wait for them. Raises UserError for an address that cannot be used, `client` still open.
    """
    with bind(host, port) as listener:
        asyncio.run(_serve(app, client, listener, grace))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError that says what to change."""
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} does not exist: choose one from 1 to 65535 with --port, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"{host!r} is no address or name known to this machine ({error}): choose another with --host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)  # here too, for of two that may bind one address only one may listen
    except OSError as error:
        listener.close()
        raise UserError(_why_not(error, host, port)) from None
    return listener


def _why_not(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use: choose another with --port"
        case errno.EACCES:
            return f"port {port} needs the rights of root: choose one from 1024 on with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine: choose 127.0.0.1, or 0.0.0.0 for all it has, with --host"
        case _:
            return f"cannot serve on port {port} of {host} ({error}): choose others with --host and --port"


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


async def _serve(app: FastAPI, client: EngineClient, listener: socket.socket, grace: float) -> None:
    name = (await client.info()).name
    server = _Server(app, f"Serving {name} at {address(listener)} (Ctrl-C stops it)")
    told, told_again = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (told_again if told.is_set() else told).set())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await _first_of(serving, told.wait())
        server.should_exit = True  # open answers go on, nothing new is taken
        await _first_of(serving, told_again.wait(), timeout=grace)
    finally:
        await _close(client)  # this ends the answers still open
    await asyncio.wait({serving}, timeout=_LAST_SECONDS)
    if serving.done():
        await serving
    else:
        logger.warning("some clients did not read their answers to the end: their connections are cut")


async def _first_of(serving: asyncio.Task[None], signalled: Coroutine[None, None, bool], timeout: float | None = None) -> None:
    waiting = asyncio.create_task(signalled)
    try:
        await asyncio.wait({serving, waiting}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _close(client: EngineClient) -> None:
    try:
        await asyncio.wait_for(client.close(), _CLOSE_SECONDS)
    except TimeoutError:
        logger.warning("the engine did not end its step within %s seconds: it is left behind", _CLOSE_SECONDS)


class _Server(uvicorn.Server):
    """Says when it takes requests, and leaves signals to `_serve`: ending the engine is a part of stopping."""

    def __init__(self, app: FastAPI, greeting: str) -> None:
        # Without the lifespan protocol: the app has nothing to start. Warnings alone, no line per request.
        super().__init__(uvicorn.Config(app, lifespan="off", ws="none", log_level="warning", access_log=False, server_header=False))
        self._greeting = greeting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._greeting, flush=True)
