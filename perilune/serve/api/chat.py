"""POST /v1/chat/completions."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from perilune.errors import UserError
from perilune.model.chat_format import ChatFormat, chat_format
from perilune.model.vocabulary import Tokenizer
from perilune.serve.api.chat_answer import ChatChunks, chat_choice
from perilune.serve.api.chat_reader import ChatPiece, ChatReader
from perilune.serve.api.chat_request import ChatRequest
from perilune.serve.api.choices import at_once, read_choice
from perilune.serve.api.conversation import conversation, declarations
from perilune.serve.api.engine_requests import engine_requests, served
from perilune.serve.api.errors import ApiError
from perilune.serve.api.responses import ChatChunk, ChatChunkChoice, ChatCompletion, Usage, json_answer, usage
from perilune.serve.api.streaming import open_stream, unless_disconnected
from perilune.serve.client.protocol import EngineClient

Pieces = AsyncGenerator[tuple[int, ChatPiece]]


def chat_router(client: EngineClient, tokenizer: Tokenizer) -> APIRouter:
    """The chat endpoint. Raises UserError for a vocabulary without a chat format."""
    router = APIRouter()
    form = chat_format(tokenizer)

    @router.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        info = await served(client, body.model)
        # In a thread: a long conversation takes long to encode, and others wait for their tokens.
        prompt_ids = await asyncio.to_thread(_prompt_ids, body, form)
        requests = engine_requests(
            body, prompt_ids, info, prompt_field="messages", end_ids=form.end_ids, top_logprobs=body.top_logprobs, max_tokens=None
        )
        choices = [read_choice(client, one, _reader(body, form, tokenizer)) for one in requests]
        answer = _Answer(body, tokenizer, info.name, prompt_ids)
        if body.stream:
            return await open_stream(request, answer.chunks(at_once(choices)))
        return json_answer(await unless_disconnected(request, answer.whole(at_once(choices))))

    return router


def _prompt_ids(body: ChatRequest, form: ChatFormat) -> list[int]:
    thinking = body.reasoning_effort != "none"
    tools = declarations(body.tools)
    try:
        return form.prompt_ids(
            conversation(body.messages),
            tools,
            effort=body.reasoning_effort if body.reasoning_effort != "none" else None,
            thinking=thinking,
            tool_choice="none" if tools and body.tool_choice == "none" else None,
        )
    except UserError as error:
        raise ApiError(400, str(error), "messages") from None


def _reader(body: ChatRequest, form: ChatFormat, tokenizer: Tokenizer) -> ChatReader:
    unseen_ids = set(body.stop_token_ids) - set(form.end_ids)
    parser = form.parser(thinking=body.reasoning_effort != "none")
    return ChatReader(parser, body.stop, body.may_call, tokenizer.vocab_size, unseen_ids)


class _Answer:
    """The answer to one request."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, model: str, prompt_ids: Sequence[int]) -> None:
        self._body, self._tokenizer, self._model, self._prompt_ids = body, tokenizer, model, prompt_ids
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    async def whole(self, pieces: Pieces) -> ChatCompletion:
        by_choice: list[list[ChatPiece]] = [[] for _ in range(self._body.n)]
        async with aclosing(pieces):
            async for index, piece in pieces:
                by_choice[index].append(piece)
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[chat_choice(index, self._body, self._tokenizer, of_choice) for index, of_choice in enumerate(by_choice)],
            usage=self._usage(sum(piece.token is not None for of_choice in by_choice for piece in of_choice)),
            prompt_token_ids=self._shown_prompt_ids(),
        )

    async def chunks(self, pieces: Pieces) -> AsyncGenerator[ChatChunk]:
        writers = [ChatChunks(index, self._body, self._tokenizer) for index in range(self._body.n)]
        num_tokens = 0
        prompt_ids = self._shown_prompt_ids()
        async with aclosing(pieces):
            async for index, piece in pieces:
                num_tokens += piece.token is not None
                for choice in writers[index].take(piece):
                    yield self._chunk([choice], prompt_ids=prompt_ids)
                    prompt_ids = None
        if self._body.includes_usage:
            yield self._chunk([], usage=self._usage(num_tokens))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None, prompt_ids: list[int] | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )

    def _shown_prompt_ids(self) -> list[int] | None:
        return list(self._prompt_ids) if self._body.return_token_ids else None

    def _usage(self, num_tokens: int) -> Usage:
        return usage(len(self._prompt_ids), num_tokens)
