"""Sequence: one request on its way through the engine."""

import secrets

import torch
from torch import Tensor

from perilune.serve.generation import FinishReason, GenerationRequest
from perilune.serve.sampler import Draw


class Sequence:
    """The tokens of a request, how many of them the network has seen, and where their state is kept.

    It is *waiting* without a slot; then *prefilling* while more than its last sampled token is unseen; then *decoding*.
    """

    def __init__(self, request: GenerationRequest, max_length: int) -> None:
        self.request = request
        self.ids = list(request.prompt_ids)
        self.num_seen = 0
        self.slot: int | None = None
        limit = request.sampling.max_tokens
        self._end = max_length if limit is None else min(max_length, len(self.ids) + limit)
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        self._experts: list[Tensor] = []

    @property
    def num_unseen(self) -> int:
        return len(self.ids) - self.num_seen

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def is_decoding(self) -> bool:
        return self.num_sampled > 0

    def draw(self) -> Draw:
        return Draw(self.request.sampling, self._seed, len(self.ids))

    def see(self, count: int, experts: Tensor | None) -> None:
        """The network has read the next `count` tokens, and sent them to `experts` [count, moe_layers, top_k]."""
        self.num_seen += count
        if experts is not None:
            # A small copy: what comes is a view of the whole batch's.
            self._experts.append(experts.to(torch.int16))

    def append(self, token_id: int) -> FinishReason | None:
        """Add a sampled token; why the sequence ends with it, None if it goes on."""
        self.ids.append(token_id)
        if token_id in self._stop_ids:
            return "stop"
        return "length" if len(self.ids) >= self._end else None

    def experts(self) -> Tensor | None:
        """[positions seen, moe_layers, top_k], None if they were not asked for or nothing was seen."""
        return torch.cat(self._experts).long() if self._experts else None
