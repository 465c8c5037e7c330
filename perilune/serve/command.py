"""`perilune serve` and `perilune chat`: from options to a server or a conversation."""

import asyncio
import sys

from perilune.errors import UserError
from perilune.model.chat_format import chat_format
from perilune.model.chat_messages import Effort
from perilune.serve.api.app import create_app
from perilune.serve.api.server import bind, run_server
from perilune.serve.chat_repl import ChatOptions, chat, open_terminal
from perilune.serve.generation import SamplingParams
from perilune.serve.launch import LaunchOptions, launch

EFFORTS: dict[str, Effort | None] = {"low": "low", "high": "high", "max": "max", "none": None}


def serve(options: LaunchOptions, *, host: str, port: int, api_key: str | None) -> None:
    """Serve a Hub directory until Ctrl-C. Raises UserError for whatever is wrong with directory, options, memory or address."""
    bind(host, port).close()  # said before the model is read, which may take minutes
    launched = launch(options)
    print(launched.summary, file=sys.stderr)
    app = create_app(launched.client, launched.tokenizer, api_key=api_key, max_update_bytes=launched.largest_update)
    run_server(app, launched.client, host=host, port=port)


def converse(options: LaunchOptions, *, system: str | None, effort: str, sampling: SamplingParams) -> None:
    """Talk to the model of a Hub directory in this terminal. Raises UserError as `serve` does, and for an unknown effort."""
    if effort not in EFFORTS:
        raise UserError(f"effort {effort!r} is not one of {', '.join(EFFORTS)}: choose one with --effort")
    launched = launch(options)
    chat_format(launched.tokenizer)
    console, read_line = open_terminal()

    async def run() -> None:
        try:
            await chat(launched.client, launched.tokenizer, ChatOptions(system, EFFORTS[effort], sampling), console, read_line)
        finally:
            await launched.client.close()

    asyncio.run(run())
