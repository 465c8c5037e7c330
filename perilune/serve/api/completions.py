"""POST /v1/completions."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from perilune.errors import UserError
from perilune.model.vocabulary import Tokenizer
from perilune.serve.api.choices import at_once, read_choice
from perilune.serve.api.completion_reader import CompletionReader, TextPiece
from perilune.serve.api.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from perilune.serve.api.engine_requests import engine_requests, served
from perilune.serve.api.errors import ApiError
from perilune.serve.api.logprobs import completion_logprobs
from perilune.serve.api.responses import Completion, CompletionChoice, FinishReason, Usage, json_answer, usage
from perilune.serve.api.streaming import open_stream, unless_disconnected
from perilune.serve.client.protocol import EngineClient

Pieces = AsyncGenerator[tuple[int, TextPiece]]


def completions_router(client: EngineClient, tokenizer: Tokenizer) -> APIRouter:
    """The completion endpoint. Choice j of prompt i of a batch has the index i * n + j."""
    router = APIRouter()
    end_ids = (tokenizer.eos_id, tokenizer.end_of_message_id)

    @router.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        info = await served(client, body.model)
        prompts = await asyncio.to_thread(_prompts, body, tokenizer)
        requests = [
            one
            for prompt in prompts
            for one in engine_requests(
                body,
                prompt,
                info,
                prompt_field="prompt",
                end_ids=end_ids,
                top_logprobs=body.logprobs or 0,
                max_tokens=DEFAULT_MAX_TOKENS,
            )
        ]
        choices = [read_choice(client, one, CompletionReader(tokenizer, body.stop, body.stop_token_ids)) for one in requests]
        answer = _Answer(body, tokenizer, info.name, prompts)
        if body.stream:
            return await open_stream(request, answer.chunks(at_once(choices)))
        return json_answer(await unless_disconnected(request, answer.whole(at_once(choices))))

    return router


def _prompts(body: CompletionRequest, tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return [tokenizer.encode_text(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]
    except UserError as error:
        raise ApiError(400, str(error), "prompt") from None


class _Answer:
    """The answer to one request."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer, model: str, prompts: Sequence[Sequence[int]]) -> None:
        self._body, self._tokenizer, self._model, self._prompts = body, tokenizer, model, prompts
        self._num_choices = len(prompts) * body.n
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    async def whole(self, pieces: Pieces) -> Completion:
        by_choice: list[list[TextPiece]] = [[] for _ in range(self._num_choices)]
        async with aclosing(pieces):
            async for index, piece in pieces:
                by_choice[index].append(piece)
        num_tokens = sum(piece.token is not None for of_choice in by_choice for piece in of_choice)
        choices = [self._choice(index, of_choice, is_first=True) for index, of_choice in enumerate(by_choice)]
        return self._completion(choices, self._usage(num_tokens))

    async def chunks(self, pieces: Pieces) -> AsyncGenerator[Completion]:
        unsent: list[list[TextPiece]] = [[] for _ in range(self._num_choices)]
        has_begun = [False] * self._num_choices
        num_tokens = 0
        async with aclosing(pieces):
            async for index, piece in pieces:
                num_tokens += piece.token is not None
                unsent[index].append(piece)
                if piece.text or piece.finish_reason is not None:
                    yield self._completion([self._choice(index, unsent[index], is_first=not has_begun[index])])
                    unsent[index], has_begun[index] = [], True
        if self._body.includes_usage:
            yield self._completion([], self._usage(num_tokens))

    def _choice(self, index: int, pieces: Sequence[TextPiece], is_first: bool) -> CompletionChoice:
        finish_reason: FinishReason | None = pieces[-1].finish_reason
        tokens = [piece.token for piece in pieces if piece.token is not None]
        offsets = [piece.offset for piece in pieces if piece.token is not None]
        shows_ids = self._body.return_token_ids
        return CompletionChoice(
            index=index,
            text="".join(piece.text for piece in pieces),
            finish_reason=finish_reason,
            logprobs=completion_logprobs(self._tokenizer, tokens, offsets) if self._body.logprobs is not None else None,
            prompt_token_ids=list(self._prompts[index // self._body.n]) if shows_ids and is_first else None,
            token_ids=[token.id for token in tokens] if shows_ids else None,
        )

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices, usage=usage)

    def _usage(self, num_tokens: int) -> Usage:
        return usage(sum(map(len, self._prompts)), num_tokens)
