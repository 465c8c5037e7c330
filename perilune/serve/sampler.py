"""Sampler: from logits to one token a row, every row with its own settings and its own randomness."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.serve.generation import SamplingParams


@dataclass(frozen=True)
class Draw:
    """What one row of logits is sampled with. `position`: index of the new token in its sequence, prompt included."""

    params: SamplingParams
    seed: int
    position: int

    def uniform(self) -> float:
        """A number in [0, 1) that depends on seed and position alone: not on the batch, nor on whether the tokens before it were
        sampled in this request or came back as its prompt. (Philox, a counter-based generator: Salmon et al., SC'11.)"""
        bits = np.random.Philox(key=self.seed % 2**64, counter=self.position)
        return float(np.random.Generator(bits).random())


@dataclass(frozen=True)
class Samples:
    """`ids` [rows] int64; `logprobs` [rows] fp32 in the model's own distribution; `top` per row its (id, logprob), falling."""

    ids: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]]


def sample(logits: Tensor, draws: Sequence[Draw], num_ids: int | None = None) -> Samples:
    """One token for each row of `logits` [rows, vocab_size], among the first `num_ids` of the vocabulary. Log-probabilities are those
    of the whole vocabulary, as a trainer computes them. Rows must be finite: the caller has looked."""
    logprobs = torch.log_softmax(logits, -1)[:, :num_ids]
    logits = logits[:, :num_ids]
    ids = logits.argmax(-1)
    # Rows that something is cut from are inverted in another order than whole ones, so a row's company must not decide which.
    for is_cut, sample_rows in ((False, _sample_whole), (True, _sample_cut)):
        rows = [row for row, draw in enumerate(draws) if draw.params.temperature > 0 and _is_cut(draw.params) == is_cut]
        if rows:
            group = [draws[row] for row in rows]
            ids[rows] = sample_rows(_weights(logits[rows], [draw.params.temperature for draw in group]), group)
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    return Samples(ids.tolist(), chosen.tolist(), _top(logprobs, [draw.params.top_logprobs for draw in draws]))


def _is_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _sample_whole(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    return _invert(weights, draws).squeeze(1)


def _sample_cut(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    return order.gather(1, _invert(_cut(ordered, [draw.params for draw in draws]), draws)).squeeze(1)


def _weights(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """exp((logit - largest) / temperature), fp64: the largest is 1 at any temperature, however small."""
    wide = logits.double()
    wide = wide - wide.amax(-1, keepdim=True)
    return (wide / torch.tensor(temperatures, dtype=torch.float64, device=logits.device).unsqueeze(1)).exp()


def _cut(ordered: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`ordered` [rows, vocab_size], falling, with what top_k and then top_p leave out set to zero; the first is always kept."""
    size, device = ordered.shape[1], ordered.device
    rank = torch.arange(size, device=device)
    top_k = torch.tensor([p.top_k or size for p in params], device=device)
    kept = torch.where(rank < top_k.unsqueeze(1), ordered, 0.0)
    before = kept.cumsum(-1) - kept
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    # At 1 nothing is left out, not even what rounding of the sums would put beyond the whole.
    is_outside = (before >= top_p * kept.sum(-1, keepdim=True)) & (top_p < 1) & (rank > 0)
    return kept.masked_fill(is_outside, 0.0)


def _invert(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """[rows, 1]: the first index whose cumulated weight exceeds uniform * total. A weight of zero is never chosen."""
    cumulated = weights.cumsum(-1)
    uniform = torch.tensor([draw.uniform() for draw in draws], dtype=torch.float64, device=weights.device).unsqueeze(1)
    place = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)
    # The product may round up to the total: the last index that has weight is meant then.
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1, keepdim=True)
    return torch.minimum(place, last)


def _top(logprobs: Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    most = min(max(counts, default=0), logprobs.shape[1])
    if not most:
        return [()] * len(counts)
    values, ids = logprobs.topk(most, dim=-1)
    pairs = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [tuple(row[:count]) for row, count in zip(pairs, counts, strict=True)]
