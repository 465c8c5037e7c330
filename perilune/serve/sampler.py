"""Sampler: from logits to one token a row, every row with its own settings and its own randomness."""

from collections.abc import Sequence
from dataclasses import dataclass

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
        sampled in this request or came back as its prompt. (SplitMix64: Steele, Lea, Flood, OOPSLA 2014; element `position` of the
        stream that begins at the mixed seed.)"""
        return (_mix(_mix(self.seed) + self.position * _GOLDEN) >> 11) * 2.0**-53


_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(number: int) -> int:
    """SplitMix64's output function, of a number modulo 2^64."""
    number = (number + _GOLDEN) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


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
    """Looks at the likeliest few first: sorting a whole vocabulary costs many times the rest."""
    size = weights.shape[1]
    few = max(_CANDIDATES, size // 64)
    if size <= few:
        return _sample_sorted(weights, draws)
    params = [draw.params for draw in draws]
    candidates = weights.topk(few, dim=-1).indices.sort(dim=-1).values  # equal weights: the lower id first
    ordered, place = weights.gather(1, candidates).sort(dim=-1, descending=True, stable=True)
    kept = _cut(ordered, params, weights.sum(-1, keepdim=True))
    # All is well if the cut lies among the candidates, and none of what it keeps weighs the same as something beyond them.
    least_kept = kept.masked_fill(kept == 0, torch.inf).amin(-1)
    is_enough = (least_kept > ordered[:, -1]) & torch.tensor([not few <= p.top_k < size for p in params], device=weights.device)
    ids = candidates.gather(1, place.gather(1, _invert(kept, draws))).squeeze(1)
    rest = (~is_enough).nonzero().squeeze(1)
    if len(rest):
        ids[rest] = _sample_sorted(weights[rest], [draws[row] for row in rest.tolist()])
    return ids


_CANDIDATES = 256


def _sample_sorted(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    kept = _cut(ordered, [draw.params for draw in draws], weights.sum(-1, keepdim=True))
    return order.gather(1, _invert(kept, draws)).squeeze(1)


def _weights(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """exp((logit - largest) / temperature), fp64: the largest is 1 at any temperature, however small."""
    wide = logits.double()
    wide = wide - wide.amax(-1, keepdim=True)
    return (wide / torch.tensor(temperatures, dtype=torch.float64, device=logits.device).unsqueeze(1)).exp()


def _cut(ordered: Tensor, params: Sequence[SamplingParams], whole: Tensor) -> Tensor:
    """`ordered` [rows, likeliest], falling, with what top_k and then top_p leave out set to zero; the first is always kept. `whole`
    [rows, 1]: the weight of the whole row, which top_p refers to where top_k does not cut."""
    size, device = ordered.shape[1], ordered.device
    rank = torch.arange(size, device=device)
    top_k = torch.tensor([min(p.top_k or size, size) for p in params], device=device).unsqueeze(1)
    kept = torch.where(rank < top_k, ordered, 0.0)
    before = kept.cumsum(-1) - kept
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    total = torch.where(top_k < size, kept.sum(-1, keepdim=True), whole)
    # At 1 nothing is left out, not even what rounding of the sums would put beyond the whole.
    is_outside = (before >= top_p * total) & (top_p < 1) & (rank > 0)
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
    """The likeliest of each row; of equal ones the lower id first, as greedy sampling takes them."""
    most = min(max(counts, default=0), logprobs.shape[1])
    if not most:
        return [()] * len(counts)
    lowest = logprobs.topk(most, dim=-1).values
    return [_top_of_row(row, values, min(count, most)) for row, values, count in zip(logprobs, lowest, counts, strict=True)]


def _top_of_row(row: Tensor, falling: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """`falling`: the highest values of the row, at least `count` of them."""
    if not count:
        return ()
    ids = (row >= falling[count - 1]).nonzero().squeeze(1)
    values, order = row[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
