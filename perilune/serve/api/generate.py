"""POST /inference/v1/generate: token ids in, token ids and log-probabilities out.

An RL loop trains on exactly the ids that were sampled, so nothing here passes through text. The shape is vLLM's (see
`generate_types.py`); beyond it, an answer says which weights gave each token. Where vLLM writes -9999 for a log-probability
that it does not have, this endpoint fails.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from perilune.model.vocabulary import Tokenizer
from perilune.serve.api.engine_requests import check_ids, served
from perilune.serve.api.generate_types import (
    ChoiceLogprobs,
    GenerateBody,
    GenerateChoice,
    GenerateChunk,
    GenerateResponse,
    TokenLogprob,
    TopLogprob,
    encode_experts,
)
from perilune.serve.api.responses import json_answer, usage
from perilune.serve.api.streaming import close_iterator, open_stream, unless_disconnected
from perilune.serve.client.protocol import EngineClient
from perilune.serve.generation import (
    EngineInfo,
    Finished,
    GenerationError,
    GenerationRequest,
    SampledToken,
    SamplingParams,
    new_request_id,
)


def generate_router(client: EngineClient, tokenizer: Tokenizer) -> APIRouter:
    """The token endpoint. `tokenizer` says which tokens end an answer unless the request has `ignore_eos`."""
    router = APIRouter()

    @router.post("/inference/v1/generate", response_model=GenerateResponse)
    async def generate(body: GenerateBody, http_request: Request) -> Response:
        info = await (client.info() if body.model is None else served(client, body.model))
        request = _engine_request(body, info, tokenizer)
        if not body.stream:
            generation = await unless_disconnected(http_request, client.generate(request))
            choice = await _choice(generation.tokens, generation.finished)
            answer = GenerateResponse(
                request_id=request.request_id,
                model=info.name,
                choices=[choice],
                prompt_token_ids=body.token_ids,
                weight_version=choice.weight_versions[-1] if choice.weight_versions else (await client.info()).weight_version,
                usage=usage(len(request.prompt_ids), len(generation.tokens)),
            )
            return json_answer(answer)
        return await open_stream(http_request, _chunks(request, info, client.stream(request), body.stream_options.include_usage))

    return router


def _engine_request(body: GenerateBody, info: EngineInfo, tokenizer: Tokenizer) -> GenerationRequest:
    fields = body.sampling_params
    check_ids(body.token_ids, info, "token_ids")
    check_ids(fields.stop_token_ids, info, "sampling_params.stop_token_ids")
    ends = () if fields.ignore_eos else (tokenizer.end_of_message_id, tokenizer.eos_id)
    sampling = SamplingParams(
        max_tokens=fields.max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(fields.top_k, 0),
        seed=fields.seed,
        # A model may have fewer ids than its tokenizer: what it cannot sample cannot end it.
        stop_token_ids=tuple(dict.fromkeys((*fields.stop_token_ids, *(token for token in ends if token < info.vocab_size)))),
        top_logprobs=fields.logprobs,
    )
    return GenerationRequest(tuple(body.token_ids), sampling, body.return_routed_experts, body.request_id or new_request_id())


async def _chunks(
    request: GenerationRequest, info: EngineInfo, events: AsyncIterator[SampledToken | Finished], include_usage: bool
) -> AsyncGenerator[GenerateChunk]:
    """An answer in pieces. However this ends, `events` is closed, which aborts a request still running."""
    count = 0
    finished = None
    try:
        async for event in events:
            if isinstance(event, Finished):
                finished = event
                choice = await _choice((), event)
            else:
                count += 1
                choice = await _choice((event,), None)
            yield GenerateChunk(request_id=request.request_id, model=info.name, choices=[choice])
        if finished is None:
            raise GenerationError(f"the engine left request {request.request_id} before its end: send it again")
        if include_usage:
            yield GenerateChunk(request_id=request.request_id, model=info.name, choices=[], usage=usage(len(request.prompt_ids), count))
    finally:
        await close_iterator(events)


async def _choice(tokens: Sequence[SampledToken], finished: Finished | None) -> GenerateChoice:
    experts = finished.experts if finished is not None else None
    return GenerateChoice(
        index=0,
        token_ids=[token.id for token in tokens],
        finish_reason=finished.reason if finished is not None else None,
        logprobs=ChoiceLogprobs(content=[_logprob(token) for token in tokens]),
        # Tens of megabytes for a long answer of a large model: not on the event loop.
        routed_experts=await asyncio.to_thread(encode_experts, experts) if experts is not None else None,
        weight_versions=[token.weight_version for token in tokens],
    )


def _logprob(token: SampledToken) -> TokenLogprob:
    pairs = ((token.id, token.logprob), *token.top)
    wrong = next((pair for pair in pairs if pair[1] is None or not math.isfinite(pair[1])), None)
    if wrong is not None:
        raise GenerationError(
            f"the engine gave token {wrong[0]} the log-probability {wrong[1]} with weights of version {token.weight_version}, "
            "which nothing can be trained on: check the weights"
        )
    own, *top = (TopLogprob(token=f"token_id:{id}", logprob=logprob, bytes=None) for id, logprob in pairs)
    return TokenLogprob(token=own.token, logprob=own.logprob, bytes=None, top_logprobs=top)
