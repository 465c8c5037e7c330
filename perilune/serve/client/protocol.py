"""EngineClient: what a user of an engine can ask of it, whether it runs in this process or behind HTTP."""

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Protocol

from torch import Tensor

from perilune.serve.generation import EngineInfo, Finished, Generation, GenerationRequest, SampledToken


class EngineClient(Protocol):
    """One engine. Every method may be called from many tasks at once.

    Requests it cannot take raise UserError (a prompt too long, an id outside the vocabulary, a bad sampling value, an id of a
    request still running), EngineBusyError, or GenerationError when the engine itself failed.
    """

    def stream(self, request: GenerationRequest) -> AsyncIterator[SampledToken | Finished]:
        """The sampled tokens as they come, then `Finished`, once. Closing the iterator early, or cancelling its task, aborts."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """All of it. If someone aborts it meanwhile, what there is so far with reason `abort`; cancelling this call aborts it too."""

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests after the engine's current step; what they sampled reaches their callers, reason `abort`. Ids of
        requests that are finished or unknown are ignored."""

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights (`Decoder.state_dict()`) between two steps; running requests go on with the new ones, from the states
        that the old ones left. All or nothing: UserError for missing, unknown, misshapen or non-finite tensors, with nothing changed."""

    async def info(self) -> EngineInfo: ...

    async def close(self) -> None:
        """End all requests with reason `abort` and let go of what the client holds."""
