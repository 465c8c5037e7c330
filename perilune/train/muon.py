"""Per-head Muon: momentum, orthogonalised one attention head at a time.

Muon (Jordan et al. 2024) replaces the momentum M of a matrix by the nearest orthogonal matrix, found by Newton-Schulz iterations of a fixed
odd quintic. The Kimi K3 report splits the momentum of query, key and value projections along heads first, so that a head with a large
gradient does not set the scale of the others. Stacked expert weights are treated as the separate matrices they are.

Update scale: 0.2 * sqrt(max(rows, columns)) of the orthogonalised block (Moonlight, arXiv 2502.16982; Kimi K2). An orthogonal
block has an RMS of 1/sqrt(max(rows, columns)), so every update has an RMS near 0.2 whatever the block's shape, which is what
AdamW's updates have in practice: one learning rate and one weight decay then serve both optimizers, and splitting into heads does
not change the effective learning rate. The other scale in use, sqrt(max(1, rows/columns)), would need a learning rate of its own.

Small models are bound by the number of operations, so blocks of one shape from all parameters are orthogonalised together, in
stacks that fit a CPU's cache. `muon_step_reference` is the slow twin: one parameter, one head at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

import torch

NEWTON_SCHULZ_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""a, b, c of p(x) = ax + bx^3 + cx^5, chosen by Jordan et al. for a steep slope at 0: singular values end near 1 (0.7 to 1.2), not at 1."""

# Blocks stacked for one batched product. On a CPU the chain's three intermediates should stay in the second-level cache: with 128 x 128
# blocks, stacks of 0.5 MiB are 1.7 times as fast as one stack of 60. On an accelerator the limit only bounds memory.
_CPU_STACK_ELEMENTS = 1 << 17
_ACCELERATOR_STACK_ELEMENTS = 1 << 26

_TINY_NORM = 1e-10  # keeps a zero block zero instead of NaN


@dataclass(frozen=True)
class MatrixParameter:
    """A parameter for Muon: `[rows, columns]`, or `[..., rows, columns]` for stacked matrices such as experts `[E, f, d]`.

    `heads` blocks of equal size split the rows (output features) of each matrix; None keeps it whole.
    """

    parameter: torch.nn.Parameter
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.parameter.ndim < 2:
            raise ValueError(f"Muon needs a matrix, got shape {tuple(self.parameter.shape)}")
        if self.parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Muon needs fp32 parameters (train in bf16 through autocast), got {self.parameter.dtype}")
        if self.heads is not None and (self.heads < 1 or self.parameter.shape[-2] % self.heads):
            raise ValueError(f"{self.heads} heads do not divide the rows of {tuple(self.parameter.shape)}")


def update_scale(rows: int, columns: int) -> float:
    """0.2 * sqrt(max(rows, columns)); see the top of this file for why."""
    return 0.2 * math.sqrt(max(rows, columns))


def newton_schulz(blocks: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Orthogonalise each block of `[blocks, rows, columns]`: U V^T of its singular value decomposition, roughly.

    Fastest when rows <= columns, because the products then have the smaller side. Zero blocks stay zero.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x: torch.Tensor = blocks / (torch.linalg.matrix_norm(blocks, keepdim=True) + _TINY_NORM)  # spectral norm <= Frobenius norm = 1
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay and Nesterov momentum.

    For each block with gradient G: M <- momentum M + (1 - momentum) G; N = (1 - momentum) G + momentum M;
    W <- (1 - lr weight_decay) W - lr update_scale NewtonSchulz(N). Parameters without a gradient are left alone, decay included.

    orthogonalise_dtype: dtype of the Newton-Schulz products; bfloat16 halves their cost on a GPU, the iteration tolerates it.
    Raises ValueError for values out of range.
    """

    def __init__(
        self,
        matrices: Iterable[MatrixParameter],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        newton_schulz_steps: int = 5,
        orthogonalise_dtype: torch.dtype = torch.float32,
    ) -> None:
        if lr < 0.0 or weight_decay < 0.0:
            raise ValueError(f"lr and weight_decay must not be negative, got {lr} and {weight_decay}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
        if newton_schulz_steps < 1:
            raise ValueError(f"newton_schulz_steps must be at least 1, got {newton_schulz_steps}")
        by_heads: dict[int, list[torch.nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_heads[matrix.heads or 1].append(matrix.parameter)
        # Heads sit in the groups, not on the parameters: wrappers replace parameter objects and would lose them.
        groups = [{"params": parameters, "heads": heads} for heads, parameters in sorted(by_heads.items())]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.newton_schulz_steps = newton_schulz_steps
        self.orthogonalise_dtype = orthogonalise_dtype

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = []
        blocks: list[torch.Tensor] = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            nesterov = self._advance_momentum(parameters, group["momentum"])
            blocks += [_as_blocks(update, group["heads"]) for update in nesterov]
            updates.append((group, parameters, nesterov))
        _orthogonalise_in_place(blocks, self.newton_schulz_steps, self.orthogonalise_dtype)
        for group, parameters, nesterov in updates:
            torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, nesterov, alpha=-group["lr"])
        return loss

    def _advance_momentum(self, parameters: Sequence[torch.nn.Parameter], momentum: float) -> list[torch.Tensor]:
        """Update the momentum buffers and return the Nesterov look-ahead in fresh contiguous tensors."""
        gradients = []
        buffers = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            gradients.append(parameter.grad.contiguous())
            buffers.append(state["momentum_buffer"])
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        return list(torch._foreach_lerp(gradients, buffers, momentum))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError also when the saved heads differ, which torch would silently adopt."""
        saved = [group.get("heads") for group in state_dict["param_groups"]]
        own = [group["heads"] for group in self.param_groups]
        if saved != own:
            raise ValueError(f"the saved Muon state is split into {saved} heads, this model into {own}")
        super().load_state_dict(state_dict)


def _as_blocks(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """View contiguous `[..., rows, columns]` as `[matrices * heads, rows / heads, columns]`."""
    return matrix.view(-1, matrix.shape[-2] // heads, matrix.shape[-1])


def _orthogonalise_in_place(blocks: Iterable[torch.Tensor], steps: int, dtype: torch.dtype) -> None:
    """Replace every block of the given `[n, rows, columns]` tensors by its scaled orthogonalisation, equal shapes together."""
    by_shape: dict[tuple[torch.device, int, int], list[torch.Tensor]] = defaultdict(list)
    for block in blocks:
        wide = block if block.shape[1] <= block.shape[2] else block.mT  # so a matrix and a transposed one share a stack
        by_shape[(block.device, wide.shape[1], wide.shape[2])].append(wide)
    for (device, rows, columns), views in by_shape.items():
        limit = _CPU_STACK_ELEMENTS if device.type == "cpu" else _ACCELERATOR_STACK_ELEMENTS
        for stack in _stacks(views, max(1, limit // (rows * columns))):
            working = dtype if stack[0].dtype == torch.float32 else stack[0].dtype  # fp64 parameters are for tests: keep their precision
            result = newton_schulz(torch.cat(stack).to(working), steps).to(stack[0].dtype).mul_(update_scale(rows, columns))
            torch._foreach_copy_(stack, list(torch.split(result, [view.shape[0] for view in stack])))


def _stacks(views: list[torch.Tensor], capacity: int) -> list[list[torch.Tensor]]:
    """Cut and group `[n, rows, columns]` views so that each group holds at most `capacity` blocks."""
    stacks: list[list[torch.Tensor]] = [[]]
    room = capacity
    for view in views:
        start = 0
        while start < view.shape[0]:
            if room == 0:
                stacks.append([])
                room = capacity
            piece = view[start : start + room]
            stacks[-1].append(piece)
            room -= piece.shape[0]
            start += piece.shape[0]
    return stacks if stacks[0] else []


@torch.no_grad()
def muon_step_reference(
    matrix: MatrixParameter,
    gradient: torch.Tensor,
    momentum_buffer: torch.Tensor,
    *,
    lr: float,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    newton_schulz_steps: int = 5,
) -> None:
    """One Muon step on one parameter, one matrix and one head at a time; the parameter and its momentum buffer change in place."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    momentum_buffer.copy_(momentum * momentum_buffer + (1.0 - momentum) * gradient)
    nesterov = (1.0 - momentum) * gradient + momentum * momentum_buffer
    heads = matrix.heads or 1
    rows, columns = matrix.parameter.shape[-2] // heads, matrix.parameter.shape[-1]
    update = torch.empty_like(nesterov)
    for source, target in zip(nesterov.reshape(-1, rows, columns), update.view(-1, rows, columns), strict=True):
        x = source / (source.norm() + _TINY_NORM)
        for _ in range(newton_schulz_steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        target.copy_(update_scale(rows, columns) * x)
    matrix.parameter.mul_(1.0 - lr * weight_decay).sub_(lr * update)
