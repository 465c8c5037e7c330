"""Random inputs of the KDA operator for the tests of this folder, and how results are compared."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from perilune.kda import portable
from perilune.kda.reference import recurrent_kda


@dataclass(frozen=True)
class Sample:
    """Arguments of the ragged operator: unit keys and queries, log-decays, values, write strengths, initial states (key-first)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def to(self, dtype: torch.dtype) -> "Sample":
        return Sample(*(x.to(dtype) for x in self.tensors()))


def sample(lengths: tuple[int, ...], bound: float | None, *, heads: int = 2, key_dim: int = 6, value_dim: int = 5, seed: int = 0) -> Sample:
    """fp64 inputs; with `bound` the gates fill (bound, 0), without it they reach from nearly none to e^-50 a step."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    tokens = sum(lengths)
    raw = 2 * normal(tokens, heads, key_dim)
    return Sample(
        q=torch.nn.functional.normalize(normal(tokens, heads, key_dim), dim=-1),
        k=torch.nn.functional.normalize(normal(tokens, heads, key_dim), dim=-1),
        v=normal(tokens, heads, value_dim),
        g=-raw.exp() if bound is None else bound * torch.sigmoid(raw),
        beta=torch.sigmoid(normal(tokens, heads)),
        state=normal(len(lengths), heads, key_dim, value_dim),
    )


SCALE = 0.4


def by_loop(x: Sample, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return recurrent_kda(x.q, x.k, x.v, x.g, x.beta, lengths, x.state, SCALE)


def by_chunks(x: Sample, lengths: tuple[int, ...], chunk: int = 16, bound: float | None = None) -> tuple[Tensor, Tensor]:
    return portable.chunk_kda(x.q, x.k, x.v, x.g, x.beta, lengths, x.state, SCALE, chunk=chunk, lower_bound=bound)


def error_ratio(value: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())
