"""The KDA operator on one CPU thread: the portable backend's training rate at a small model's size, and against transformers.

The baseline is the torch chunk function of transformers' native `kimi_linear`, at chunk 16, which is its fastest.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from perilune.bench.harness import Figure, compare, measure, not_installed, ratio_figure
from perilune.kda.gates import log_decay
from perilune.kda.normalize import l2_normalize
from perilune.kda.portable import chunk_kda

SMALL_GOAL = 25_000.0
OVER_TRANSFORMERS_GOAL = 6.0


@dataclass(frozen=True)
class _Shape:
    batch: int
    tokens: int
    heads: int
    dim: int

    def __str__(self) -> str:
        return f"B{self.batch} T{self.tokens} H{self.heads} K{self.dim} V{self.dim}"


def run(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    small = _Shape(4, 256, 4, 32)
    large = _Shape(1, 256 if quick else 2048, 8, 128)
    return [_training_rate(small, runs=5 if quick else 60), _over_transformers(large, pairs=3 if quick else 30)]


def _inputs(shape: _Shape, requires_grad: bool) -> list[Tensor]:
    """q, k, v, g, beta with the K3 gate, [batch, tokens, heads, dim], reproducible."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.tokens, shape.heads, shape.dim)
    q, k, v, raw = (torch.randn(size, generator=generator) for _ in range(4))
    g = log_decay(raw, torch.zeros(shape.heads), lower_bound=-5.0)
    beta = torch.rand(size[:3], generator=generator)
    return [x.requires_grad_(requires_grad) for x in (l2_normalize(q), l2_normalize(k), v, g, beta)]


def _portable(inputs: list[Tensor], shape: _Shape, chunk: int) -> Callable[[], Tensor]:
    q, k, v, g, beta = (x.flatten(0, 1) for x in inputs)
    start = torch.zeros(shape.batch, shape.heads, shape.dim, shape.dim)

    def forward() -> Tensor:
        return chunk_kda(q, k, v, g, beta, (shape.tokens,) * shape.batch, start, shape.dim**-0.5, chunk=chunk, lower_bound=-5.0)[0]

    return forward


def _training_rate(shape: _Shape, runs: int) -> Figure:
    """Tokens per second per layer, forward and backward, at the best chunk size."""
    best: Figure | None = None
    for chunk in (16, 32, 64):
        inputs = _inputs(shape, requires_grad=True)
        forward = _portable(inputs, shape, chunk)
        gradient = torch.randn(shape.batch * shape.tokens, shape.heads, shape.dim)

        def step(forward: Callable[[], Tensor] = forward, inputs: list[Tensor] = inputs, gradient: Tensor = gradient) -> None:
            torch.autograd.grad(forward(), inputs, gradient, retain_graph=False)

        measured = measure(step, runs=runs, clock="cpu")
        rates = [shape.batch * shape.tokens / s for s in measured.seconds]  # type: ignore[union-attr]  # CPU time is always measurable
        low, high = numpy.quantile(rates, (0.1, 0.9))
        label = f"{shape} fp32 forward+backward, chunk {chunk}"
        figure = Figure(
            "portable_small_tokens_per_s",
            float(numpy.median(rates)),
            "tokens/s",
            "higher",
            label,
            SMALL_GOAL,
            spread=(float(low), float(high)),
            runs=len(rates),
        )
        if best is None or figure.value > best.value:  # type: ignore[operator]
            best = figure
    assert best is not None
    return best


def _over_transformers(shape: _Shape, pairs: int) -> Figure:
    """Forward time of transformers' function over ours, each at its best chunk."""
    name, label = "portable_over_transformers", f"{shape} fp32 forward"
    if importlib.util.find_spec("transformers") is None:
        return not_installed(name, shape=label, goal=OVER_TRANSFORMERS_GOAL)
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    inputs = _inputs(shape, requires_grad=False)
    with torch.inference_mode():
        candidates = {chunk: _portable(inputs, shape, chunk) for chunk in (16, 32, 64)}
        chunk = min(candidates, key=lambda c: measure(candidates[c], runs=3, clock="cpu").median)  # type: ignore[union-attr]
        comparison = compare(candidates[chunk], lambda: chunk_kimi_delta_attention(*inputs, chunk_size=16), min_pairs=pairs, clock="cpu")
    return ratio_figure(
        name, comparison, baseline="transformers kimi_linear chunk_kimi_delta_attention, chunk 16",
        shape=f"{label}, chunk {chunk}", goal=OVER_TRANSFORMERS_GOAL,
    )  # fmt: skip
