"""Causal depthwise convolution over ragged sequences, with the last inputs of each sequence as its cache.

K3 and Kimi Linear put one of width 4 followed by SiLU on each of the query, key and value projections (Kimi Linear,
arXiv 2510.26692, section 4). The cache holds width - 1 inputs, oldest first.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class _Edges:
    """The tokens near a sequence's start, where a shift over the whole batch would reach into the sequence before.

    first [edges]: tokens with fewer than width - 1 tokens of their sequence before them. source [width - 1, edges]: the row of
    the concatenation (history, tokens) that lies 1, 2, … inputs before each of them. crossing[s - 1]: which places of `first`
    reach into the history with shift s. tail [sequences * (width - 1)]: rows of the concatenation that are the new history.
    """

    first: Tensor
    source: Tensor
    crossing: tuple[Tensor, ...]
    tail: Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is cached must serve training too, whoever asks first
def _edges(lengths: tuple[int, ...], width: int, device: torch.device) -> _Edges:
    length = torch.tensor(lengths, dtype=torch.int64)
    start = length.cumsum(0) - length
    history, kept = width - 1, len(lengths) * (width - 1)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), length)
    within = torch.arange(int(length.sum())) - start[sequence]
    first = (within < history).nonzero().flatten()
    # Input number i of a sequence, negative numbers counting back into its history, is this row of (history, tokens).
    number = within[first] - torch.arange(1, width).unsqueeze(1)
    source = torch.where(number < 0, sequence[first] * history + history + number, kept + start[sequence[first]] + number)
    newest = length.unsqueeze(1) - history + torch.arange(history)
    base = torch.arange(len(lengths)).unsqueeze(1) * history + history
    tail = torch.where(newest < 0, base + newest, kept + start.unsqueeze(1) + newest).flatten()
    crossing = tuple((row < 0).nonzero().flatten().to(device) for row in number)
    return _Edges(first.to(device), source.to(device), crossing, tail.to(device))


class _ShortConvolution(torch.autograd.Function):
    """SiLU of y[t] = sum over s of weight[:, width - 1 - s] x[t - s], shifted over the whole batch, then edge tokens set anew.

    Takes (history, tokens) in one tensor. By hand, because autograd would keep a copy of the input for every tap. Nothing of
    one sequence, NaN included, enters another.
    """

    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor, edges: _Edges, kept: int) -> Tensor:
        x, taps = both[kept:], weight.t().flip(0).contiguous()
        y = x * taps[0]
        for shift in range(1, len(taps)):
            y[shift:].addcmul_(x[: max(len(x) - shift, 0)], taps[shift])
        y[edges.first] = x[edges.first] * taps[0] + (both[edges.source] * taps[1:].unsqueeze(1)).sum(0)
        ctx.save_for_backward(both, taps, y)
        ctx.edges, ctx.kept = edges, kept
        return F.silu(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        both, taps, y = ctx.saved_tensors
        edges, kept = ctx.edges, ctx.kept
        x, grad_y = both[kept:], torch.ops.aten.silu_backward(grad, y)
        grad_both, grad_taps = torch.zeros_like(both), torch.empty_like(taps)
        grad_x = grad_both[kept:]
        grad_x.addcmul_(grad_y, taps[0])
        grad_taps[0] = (grad_y * x).sum(0)
        for shift, crossing in enumerate(edges.crossing, start=1):
            rows, sources = edges.first[crossing], edges.source[shift - 1, crossing]
            inner = grad_y.index_fill(0, rows, 0)[shift:]
            grad_x[: len(inner)].addcmul_(inner, taps[shift])
            grad_both.index_add_(0, sources, grad_y[rows] * taps[shift])
            grad_taps[shift] = (inner * x[: len(inner)]).sum(0) + (grad_y[rows] * both[sources]).sum(0)
        return grad_both, grad_taps.flip(0).t(), None, None


def short_convolution(x: Tensor, weight: Tensor, lengths: tuple[int, ...], history: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SiLU of the causal depthwise convolution of ragged sequences laid end to end; differentiable once.

    x: [tokens, channels]; weight: [channels, width], the last column multiplies the newest input; history:
    [sequences, width - 1, channels], the inputs before each sequence (None: zeros). Returns y [tokens, channels] and the
    new history [sequences, width - 1, channels] in x's dtype, detached from the graph.
    """
    width = weight.shape[1]
    weight = weight.to(x.dtype)
    past = x.new_zeros(len(lengths), width - 1, x.shape[1]) if history is None else history.to(x.dtype)
    if len(lengths) == x.shape[0] and all(n == 1 for n in lengths):
        window = torch.cat((past, x.unsqueeze(1)), 1)
        return F.silu((window * weight.t()).sum(1)), window[:, 1:].detach()
    edges = _edges(lengths, width, x.device)
    both = torch.cat((past.flatten(0, 1), x))
    y: Tensor = _ShortConvolution.apply(both, weight, edges, len(both) - len(x))  # type: ignore[no-untyped-call]
    return y, both.detach()[edges.tail].view(past.shape)
