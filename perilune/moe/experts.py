"""The routed experts on one rank: every token through its own few gated MLPs.

    y_t = Σ_i  weight_ti · down[e] · activation(gate_e x_t, up_e x_t),   e = expert_ids_ti

Weights are stacked, with the two input projections in one parameter so that one product serves both:
`gate_up` [experts, 2·width, d] (rows 0..width-1 are the gate, "w1" in checkpoints; the rest is up, "w3") and
`down` [experts, d, width] ("w2"). K3 technical report, arXiv 2607.24653, Eq. 13.

`dense_experts` is the definition, readable and slow. `grouped_experts` sorts the (token, choice) pairs by expert and multiplies
segment by segment with torch's grouped product, so it computes exactly tokens · top_k rows. A padded batched product wastes what
the largest load exceeds the mean by, and a loop over the experts in Python pays for every product of every expert: neither
measured faster at any size tried, and each was clearly slower at some. One autograd function covers the whole path: its gathers
are each other's transposes, so neither direction needs a scatter, and the activation's gradient is fused in.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.moe.activations import GatedActivation, kept_factors, widened


def dense_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: GatedActivation) -> Tensor:
    """The slow twin of `grouped_experts`: every expert over every token, masked. Same arguments, same result up to rounding."""
    _check(x, expert_ids, weights, gate_up, down)
    wide = widened(x)
    out = torch.zeros_like(wide)
    for expert in range(gate_up.shape[0]):
        weight = (widened(weights) * (expert_ids == expert)).sum(1, keepdim=True)
        gate, up = (wide @ widened(gate_up[expert]).T).chunk(2, dim=1)
        out = out + weight * (activation(gate, up) @ widened(down[expert]).T)
    return out.to(x.dtype)


def grouped_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: GatedActivation) -> Tensor:
    """The weighted sum of each token's experts.

    `x` [tokens, d], `expert_ids` [tokens, top_k] int64, `weights` [tokens, top_k] fp32 (or the dtype of `x`),
    `gate_up` [experts, 2·width, d] and `down` [experts, d, width] in the dtype of `x` -> [tokens, d] in that dtype. Zero tokens are fine.
    Differentiable once with respect to `x`, `weights`, `gate_up` and `down`.

    Products run in the dtype of `x`; the activation, the weighting and the sum over a token's experts run in fp32 (fp64 for fp64).
    The weight is applied before the down projection, where rows are narrower and the gradient needs no copy of the expert outputs.
    A row's value depends on other tokens only through the rounding of matrix products with different numbers of rows.

    Raises ValueError for shapes or dtypes that do not fit, or ids outside 0..experts-1 (checked on CPU only: elsewhere it would
    stop the stream).
    """
    _check(x, expert_ids, weights, gate_up, down)
    arguments = (x, weights, gate_up.contiguous(), down.contiguous(), expert_ids, activation)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments[:4]):
        result: Tensor = _GroupedExperts.apply(*arguments)  # type: ignore[no-untyped-call]
        return result
    # Decoding a few tokens is all overhead, and the autograd function is a part of it that nobody needs here.
    return _forward(*arguments)[0]


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, activation: GatedActivation
    ) -> Tensor:
        out, saved = _forward(x, weights, gate_up, down, expert_ids, activation)
        ctx.save_for_backward(gate_up, down, *saved)
        ctx.activation, ctx.weights_dtype = activation, weights.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]:
        gate_up, down, rows, row_weights, projected, ends, token_of_row, row_of_choice, *kept = ctx.saved_tensors
        needs_x, needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad[:4]
        gate, up = widened(projected).chunk(2, dim=1)
        factors = tuple(kept) or ctx.activation.factors(gate, up)

        d_outputs = grad.index_select(0, token_of_row)
        d_weighted = widened(_segment_products(d_outputs, down, ends))
        activated, d_gate, d_up = ctx.activation.gradients(gate, up, factors, d_weighted * row_weights)
        d_weights = None
        if needs_weights:
            d_weights = (d_weighted * activated).sum(1).index_select(0, row_of_choice.view(-1)).view_as(row_of_choice).to(ctx.weights_dtype)
        d_down = _segment_outer_products(d_outputs, activated.mul_(row_weights).to(rows.dtype), ends) if needs_down else None
        d_projected = torch.cat((d_gate, d_up), dim=1).to(rows.dtype)
        d_gate_up = _segment_outer_products(d_projected, rows, ends) if needs_gate_up else None
        d_x = F.embedding_bag(row_of_choice, _segment_products(d_projected, gate_up, ends), mode="sum") if needs_x else None
        return d_x, d_weights, d_gate_up, d_down, None, None


def _forward(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, activation: GatedActivation
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result, and what the backward pass needs besides the parameters."""
    top_k, num_experts = expert_ids.shape[1], down.shape[0]
    sorted_ids, order = torch.sort(expert_ids.reshape(-1), stable=True)
    _check_range(sorted_ids, num_experts)
    # ends[e] is where the rows of expert e stop.
    ends = torch.searchsorted(sorted_ids, torch.arange(num_experts, device=x.device), right=True, out_int32=True)
    token_of_row = order // top_k
    row_of_choice = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device)).view_as(expert_ids)

    rows = x.index_select(0, token_of_row)
    row_weights = widened(weights).reshape(-1).index_select(0, order).unsqueeze(1)
    projected = _segment_products(rows, gate_up.transpose(1, 2), ends)
    gate, up = widened(projected).chunk(2, dim=1)
    factors = activation.factors(gate, up)
    activated = activation.value(gate, up, factors).mul_(row_weights).to(x.dtype)
    outputs = _segment_products(activated, down.transpose(1, 2), ends)
    # embedding_bag gathers and sums in one pass, and sums low precision in fp32.
    out = F.embedding_bag(row_of_choice, outputs, mode="sum")
    return out, (rows, row_weights, projected, ends, token_of_row, row_of_choice, *kept_factors(gate, factors))


def _segment_products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows [rows, p] times matrices [experts, p, q], each segment of rows with its own matrix -> [rows, q]."""
    if _grouped_mm_takes(rows, matrices.shape[2]):
        return F.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for expert, start, end in _segments(ends):
        torch.mm(rows[start:end], matrices[expert], out=out[start:end])
    return out


def _segment_outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left [rows, p], right [rows, q] -> leftᵀ right of each segment, [experts, p, q]; zero for an empty segment."""
    if _grouped_mm_takes(left, right.shape[1]):
        return F.grouped_mm(left.t(), right, offs=ends)
    out = left.new_zeros(ends.numel(), left.shape[1], right.shape[1])
    for expert, start, end in _segments(ends):
        torch.mm(left[start:end].t(), right[start:end], out=out[expert])
    return out


def _grouped_mm_takes(rows: Tensor, other_width: int) -> bool:
    """Whether torch's grouped product accepts these operands: no fp64, rows of whole 16 bytes, and off the CPU only bf16."""
    if rows.dtype == torch.float64 or (rows.dtype != torch.bfloat16 and rows.device.type != "cpu"):
        return False
    aligned = 16 // rows.element_size()
    return rows.shape[1] % aligned == 0 and other_width % aligned == 0


def _segments(ends: Tensor) -> list[tuple[int, int, int]]:
    bounds = [0, *ends.tolist()]
    return [(expert, bounds[expert], bounds[expert + 1]) for expert in range(len(bounds) - 1) if bounds[expert] < bounds[expert + 1]]


def _check_range(sorted_ids: Tensor, num_experts: int) -> None:
    if sorted_ids.device.type == "cpu" and sorted_ids.numel():
        low, high = sorted_ids[0].item(), sorted_ids[-1].item()
        if low < 0 or high >= num_experts:
            raise ValueError(f"expert ids must be in 0..{num_experts - 1}, got {low}..{high}")


def _check(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            "experts need x [tokens, d], gate_up [experts, 2·width, d] and down [experts, d, width], "
            f"got {tuple(x.shape)}, {tuple(gate_up.shape)} and {tuple(down.shape)}"
        )
    experts, hidden, width = down.shape
    if gate_up.shape != (experts, 2 * width, hidden) or x.shape[1] != hidden:
        raise ValueError(
            f"down {tuple(down.shape)} = [experts, d, width] needs gate_up {(experts, 2 * width, hidden)} and x [tokens, {hidden}], "
            f"got gate_up {tuple(gate_up.shape)} and x {tuple(x.shape)}"
        )
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0] or expert_ids.shape[1] == 0 or weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_ids and weights must have shape [{x.shape[0]} tokens, top_k], got {tuple(expert_ids.shape)} and {tuple(weights.shape)}"
        )
    if expert_ids.dtype != torch.int64:
        raise ValueError(f"expert_ids must be int64, got {expert_ids.dtype}")
    if gate_up.dtype != x.dtype or down.dtype != x.dtype:
        raise ValueError(f"x, gate_up and down must share one dtype, got {x.dtype}, {gate_up.dtype} and {down.dtype}")
