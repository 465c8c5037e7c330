"""The gated activations of every MLP in the model: SiTU-GLU (Kimi K3) and SwiGLU (Kimi Linear).

SiTU-GLU is SwiGLU with both branches capped by a tanh, which keeps the chain of unscaled matrix products around a routed
expert from exploding at high sparsity: |output| <= beta * linear_beta. It tends to SwiGLU as both betas grow
(K3 technical report, arXiv 2607.24653, section on Stable LatentMoE).

An activation is a small frozen object, so that a configuration can carry it. Calling it is differentiable; its three methods are
the same thing by hand, for code that fuses it with its neighbours (`experts.py`). They work outside autograd, in the dtype of their
arguments (fp32 or fp64), and separate what is expensive (`factors`: the transcendental functions, which on a CPU cost as much as a
tiny expert's matrix products) from what is not, so that the caller chooses between keeping the factors for the backward pass and
computing them again.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GatedActivation(Protocol):
    """What the expert and MLP code asks of an activation. `gate` and `up` have one shape, and so does every result."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation, differentiable once, computed in fp32 (fp64 for fp64 input) and returned in the dtype of `gate`."""

    def factors(self, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        """The transcendental functions of the two branches."""

    def value(self, gate: Tensor, up: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
        """The activation, as a new tensor, from its arguments and factors."""

    def gradients(self, gate: Tensor, up: Tensor, factors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(value, d gate, d up) for the incoming gradient `grad`, as new tensors."""


@dataclass(frozen=True)
class SituGlu:
    """beta·tanh(gate/beta)·σ(gate) · linear_beta·tanh(up/linear_beta).

    `beta=None` means 1.0 and `linear_beta=None` leaves the up branch uncapped, as in the published configuration class.
    """

    beta: float | None = 4.0
    linear_beta: float | None = 25.0

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("linear_beta", self.linear_beta)):
            if value is not None and not value > 0:
                raise ValueError(f"SiTU-GLU needs {name} > 0 or None, got {value}")

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return _apply(gate, up, self)

    def factors(self, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        tanh_gate = gate.tanh() if self.beta is None else (gate / self.beta).tanh_()
        if self.linear_beta is None:
            return tanh_gate, torch.sigmoid(gate)
        return tanh_gate, torch.sigmoid(gate), (up / self.linear_beta).tanh_()

    def value(self, gate: Tensor, up: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
        beta = 1.0 if self.beta is None else self.beta
        gated = factors[0] * factors[1]
        if self.linear_beta is None:
            return gated.mul_(up).mul_(beta)
        return gated.mul_(factors[2]).mul_(beta * self.linear_beta)

    def gradients(self, gate: Tensor, up: Tensor, factors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tanh_gate, sigmoid = factors[:2]
        gated = (tanh_gate * sigmoid).mul_(1.0 if self.beta is None else self.beta)
        # d gated / d gate = σ·(1 − tanh²) + gated·(1 − σ)
        slope = torch.addcmul(sigmoid, sigmoid * tanh_gate, tanh_gate, value=-1).add_(gated).addcmul_(gated, sigmoid, value=-1)
        if self.linear_beta is None:
            return gated * up, slope.mul_(up).mul_(grad), gated * grad
        tanh_up = factors[2]
        d_up = torch.mul(tanh_up, tanh_up).neg_().add_(1.0).mul_(gated).mul_(grad)
        linear = tanh_up * self.linear_beta
        return gated.mul_(linear), slope.mul_(linear).mul_(grad), d_up


@dataclass(frozen=True)
class SwiGlu:
    """gate·σ(gate)·up."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return _apply(gate, up, self)

    def factors(self, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (torch.sigmoid(gate),)

    def value(self, gate: Tensor, up: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
        return (factors[0] * gate).mul_(up)

    def gradients(self, gate: Tensor, up: Tensor, factors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (sigmoid,) = factors
        gated = sigmoid * gate
        # d gated / d gate = σ + gated·(1 − σ)
        slope = (sigmoid + gated).addcmul_(gated, sigmoid, value=-1)
        d_up = gated * grad
        return gated.mul_(up), slope.mul_(up).mul_(grad), d_up


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that activations and sums are computed in: fp64 stays, everything else becomes fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def kept_factors(gate: Tensor, factors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The factors that are worth keeping for the backward pass: all on a CPU, where a tanh costs many multiplications; none elsewhere,
    where memory is dearer than arithmetic."""
    return factors if gate.device.type == "cpu" else ()


class _GatedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: GatedActivation) -> Tensor:
        wide_gate, wide_up = widened(gate), widened(up)
        factors = activation.factors(wide_gate, wide_up)
        ctx.save_for_backward(gate, up, *kept_factors(gate, factors))
        ctx.activation = activation
        return activation.value(wide_gate, wide_up, factors).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, *kept = ctx.saved_tensors
        wide_gate, wide_up = widened(gate), widened(up)
        factors = tuple(kept) or ctx.activation.factors(wide_gate, wide_up)
        _, d_gate, d_up = ctx.activation.gradients(wide_gate, wide_up, factors, widened(grad))
        return d_gate.to(gate.dtype), d_up.to(up.dtype), None


def _apply(gate: Tensor, up: Tensor, activation: GatedActivation) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up must share one shape and dtype, got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )
    result: Tensor = _GatedFunction.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return result
