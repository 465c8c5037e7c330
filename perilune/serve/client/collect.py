"""A whole answer out of a stream of events."""

from collections.abc import AsyncIterator

from perilune.serve.generation import Finished, Generation, GenerationError, GenerationRequest, SampledToken


async def collect(request: GenerationRequest, events: AsyncIterator[SampledToken | Finished]) -> Generation:
    """All events of `request`. Raises GenerationError for a stream that ends before it is finished."""
    tokens: list[SampledToken] = []
    async for event in events:
        if isinstance(event, Finished):
            return Generation(request, tuple(tokens), event)
        tokens.append(event)
    raise GenerationError(f"the answer to request {request.request_id} ended before it was finished: send it again")
