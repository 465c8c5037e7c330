"""From the body of a text request to requests of the engine, with what only the engine can tell checked first."""

from collections.abc import Collection, Sequence

from perilune.serve.api.errors import ApiError
from perilune.serve.api.requests import Sampling
from perilune.serve.client.protocol import EngineClient
from perilune.serve.generation import EngineInfo, GenerationRequest


async def served(client: EngineClient, model: str) -> EngineInfo:
    """The engine, if `model` is what it serves. Raises ApiError, status 404, if not."""
    info = await client.info()
    if model != info.name:
        message = f"there is no model {model!r} here: this server has {info.name!r}"
        raise ApiError(404, message, "model", "model_not_found")
    return info


def engine_requests(
    body: Sampling,
    prompt_ids: Sequence[int],
    info: EngineInfo,
    *,
    prompt_field: str,
    end_ids: Collection[int],
    top_logprobs: int,
    max_tokens: int | None,
) -> list[GenerationRequest]:
    """The `body.n` requests for one prompt. `end_ids`: the model's own ends. `max_tokens`: where the body sets none.

    Raises ApiError, status 400, that names the field at fault.
    """
    check_ids(prompt_ids, info, prompt_field)
    check_ids(body.stop_token_ids, info, "stop_token_ids")
    if not prompt_ids:
        raise ApiError(400, f"{prompt_field} has no tokens: give at least one", prompt_field)
    limit = body.token_limit
    room = info.max_length - len(prompt_ids)
    if room < (limit or 1):
        limit_field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
        raise ApiError(
            400,
            f"{prompt_field} has {len(prompt_ids)} tokens and {limit_field} is {limit or 1}: together they are more than the "
            f"{info.max_length} of this server's longest sequence, so send less or ask for less",
            limit_field if room > 0 else prompt_field,
            "context_length_exceeded",
        )
    if limit is None and max_tokens is not None:
        limit = min(max_tokens, room)
    # A model may have fewer ids than its tokenizer: what it cannot sample cannot end an answer.
    ends = [] if body.ignore_eos else [end for end in end_ids if end < info.vocab_size]
    stop_token_ids = tuple(dict.fromkeys([*ends, *body.stop_token_ids]))
    return [
        GenerationRequest(tuple(prompt_ids), body.sampling_params(choice, limit, stop_token_ids, top_logprobs)) for choice in range(body.n)
    ]


def check_ids(ids: Sequence[int], info: EngineInfo, field: str) -> None:
    """Raises ApiError, status 400, that names `field` for an id that is none of the model's."""
    if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
        wrong = next(id for id in ids if not 0 <= id < info.vocab_size)
        raise ApiError(400, f"{field} has the token id {wrong}: those of this model go from 0 to {info.vocab_size - 1}", field)
