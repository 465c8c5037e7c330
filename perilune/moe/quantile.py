"""Quantile Balancing: the selection bias that would have balanced the last step, computed instead of hunted for.

A token with scores s and cutoff α (its (k+1)-th largest s + b) visits expert j when s_j + b_j > α, that is when b_j exceeds its
*margin* r_j = α − s_j. With the cutoffs held, expert j therefore receives its fair share q = m·k/n of the m tokens when b_j is the
k/n quantile of its margins. So after every optimizer step

    b_j ← quantile of r_·j at k/n,     b ← b − mean(b)

over the tokens of the whole global batch (all micro-batches, all ranks). The new bias acts from the next step on and nothing in a
forward pass changes it, so it is frozen at inference. It converges in about one step, where the sign rule of DeepSeek-V3
(`sign_update`, the baseline) moves by gamma per step. K3 technical report, arXiv 2607.24653, section on Quantile Balancing and appendix C.

The quantile is taken exactly, from all margins, or from a histogram of counts that ranks can add up: `num_bins` bins over
[min b − 1, max b + 1], which holds every margin because scores lie in [0, 1]. The two agree within a bin.
"""

import math
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Mode = Literal["exact", "histogram"]


class QuantileBalancer:
    """Collects the margins of one step for a stack of MoE layers and turns them into the next step's biases.

    Per step: `observe` for every layer and micro-batch, `reduce` once if ranks saw different tokens, `update` once.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        mode: Mode = "histogram",
        num_bins: int = 1000,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ValueError unless 1 <= top_k < num_experts (with all experts chosen there is nothing to balance and no cutoff)."""
        if num_layers < 1 or not 1 <= top_k < num_experts:
            raise ValueError(f"need num_layers >= 1 and 1 <= top_k < num_experts, got {num_layers} layers, top {top_k} of {num_experts}")
        if num_bins < 1:
            raise ValueError(f"num_bins must be positive, got {num_bins}")
        if mode not in ("exact", "histogram"):
            raise ValueError(f"mode must be 'exact' or 'histogram', got {mode!r}")
        self.num_layers, self.num_experts, self.top_k = num_layers, num_experts, top_k
        self._collected: _Margins | _Histogram
        if mode == "exact":
            self._collected = _Margins(num_layers, num_experts, torch.device(device))
        else:
            self._collected = _Histogram(num_layers, num_experts, num_bins, torch.device(device))

    @property
    def counts(self) -> Tensor:
        """The histograms of this step so far, [layers, experts, bins] int32. Raises ValueError in exact mode, which has none."""
        if isinstance(self._collected, _Margins):
            raise ValueError("a QuantileBalancer in exact mode keeps margins, not counts")
        return self._collected.counts

    def begin(self, bias: Tensor) -> None:
        """Starts a step that routes with `bias` [layers, experts] fp32, forgetting what was observed.

        `update` does this for the step that follows. Call it where a run begins with another bias than zero, such as on resuming.
        """
        self._check_bias(bias)
        self._collected.begin(bias)

    @torch.no_grad()
    def observe(self, layer: int, scores: Tensor, cutoff: Tensor, mask: Tensor | None = None) -> None:
        """Adds one micro-batch of one layer: `scores` [tokens, experts] and `cutoff` [tokens] of a `Routing` made with the current bias.

        `mask` [tokens] bool is False for tokens that do not count, such as padding. Raises ValueError for shapes that do not fit.
        Values are checked by `update`, because here that would stop an accelerator's stream.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be in 0..{self.num_layers - 1}, got {layer}")
        if scores.dim() != 2 or scores.shape[1] != self.num_experts or cutoff.shape != scores.shape[:1]:
            raise ValueError(
                f"need scores [tokens, {self.num_experts} experts] and cutoff [tokens], got {tuple(scores.shape)} and {tuple(cutoff.shape)}"
            )
        margins = (cutoff.unsqueeze(1) - scores).float()
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != cutoff.shape:
                raise ValueError(f"mask must be bool [{cutoff.shape[0]} tokens], got {mask.dtype} {tuple(mask.shape)}")
            margins = margins[mask]
        if margins.shape[0]:
            self._collected.add(layer, margins)

    def reduce(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Joins what the ranks of the group observed (the default group if None); does nothing without torch.distributed.

        A collective: every rank of the group calls it. The group is the ranks that route *different* tokens of the batch (data and
        context parallel, not tensor parallel). The histogram costs one sum of integers, exact mode gathers all margins.
        """
        if dist.is_available() and dist.is_initialized():
            self._collected.reduce(process_group)

    @torch.no_grad()
    def update(self, bias: Tensor) -> Tensor:
        """The bias [layers, experts] fp32 of the next step, each row with mean zero, and a fresh start for collecting that step.

        `bias` is the one this step routed with; a layer that observed no token keeps its row. Raises ValueError for margins that are NaN,
        infinite or, in histogram mode, out of range (then `begin` was not told about the bias); nothing has changed in that case.
        """
        self._check_bias(bias)
        self._collected.check()
        tokens, thresholds = self._collected.thresholds(self.top_k)
        centred = thresholds - thresholds.mean(1, keepdim=True)
        updated = torch.where(tokens.unsqueeze(1) > 0, centred, bias)
        self._collected.begin(updated)
        return updated

    def _check_bias(self, bias: Tensor) -> None:
        if bias.shape != (self.num_layers, self.num_experts) or bias.dtype != torch.float32:
            raise ValueError(f"bias must be float32 [{self.num_layers}, {self.num_experts}], got {bias.dtype} {tuple(bias.shape)}")


def sign_update(bias: Tensor, loads: Tensor, gamma: float) -> Tensor:
    """DeepSeek-V3's rule, the baseline: each bias moves by `gamma` towards balance, b + gamma·sign(mean load − load).

    `bias` [..., experts] fp32, `loads` [..., experts] counts -> new bias. (Wang et al., arXiv 2408.15664.)
    """
    if bias.shape != loads.shape:
        raise ValueError(f"bias and loads must share one shape, got {tuple(bias.shape)} and {tuple(loads.shape)}")
    wide = loads.double()
    return bias + gamma * torch.sign(wide.mean(-1, keepdim=True) - wide).to(bias.dtype)


def exact_thresholds(margins: Tensor, top_k: int) -> Tensor:
    """[tokens, experts] fp32 margins, at least one token -> [experts]: thresholds with exactly ⌈q⌉ of the margins below (barring ties).

    Any value between the ⌈q⌉-th smallest margin and the next one does that; this is the smallest such float, which lies in
    the bin that the histogram interpolates in.
    """
    tokens, experts = margins.shape
    fair_share = -(-tokens * top_k // experts)
    value = torch.kthvalue(margins.t().contiguous(), fair_share, dim=1).values
    return torch.nextafter(value, torch.full_like(value, math.inf))


def histogram_thresholds(counts: Tensor, top_k: int, low: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [layers, experts, bins], `low` and `width` [layers] fp32 -> (tokens [layers] int64, thresholds [layers, experts] fp32).

    The threshold lies in the first bin whose cumulative count reaches ⌈q⌉, interpolated at (q − count before) / count within.
    Meaningless for a layer with no tokens.
    """
    experts = counts.shape[1]
    cumulative = counts.cumsum(-1)
    tokens = cumulative[:, 0, -1]
    fair_share = (tokens * top_k + experts - 1) // experts
    bins = torch.searchsorted(cumulative, fair_share.view(-1, 1, 1).expand(-1, experts, 1).contiguous()).clamp_(max=counts.shape[2] - 1)
    within = counts.gather(-1, bins)
    before = cumulative.gather(-1, bins) - within
    q = tokens.double() * top_k / experts
    position = ((q.view(-1, 1, 1) - before) / within).clamp_(0.0, 1.0)
    return tokens, (low.unsqueeze(1) + width.unsqueeze(1) * (bins + position).squeeze(-1)).float()


class _Margins:
    """Exact mode: every margin of the step."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.experts, self.device = experts, device
        self.chunks: list[list[Tensor]] = [[] for _ in range(layers)]

    def begin(self, bias: Tensor) -> None:
        self.chunks = [[] for _ in self.chunks]

    def add(self, layer: int, margins: Tensor) -> None:
        self.chunks[layer].append(margins)

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        ranks = dist.get_world_size(group)
        local = torch.tensor([sum(chunk.shape[0] for chunk in chunks) for chunks in self.chunks], device=self.device)
        per_rank = [torch.empty_like(local) for _ in range(ranks)]
        dist.all_gather(per_rank, local, group=group)
        for layer, chunks in enumerate(self.chunks):
            tokens = [int(counts[layer]) for counts in per_rank]
            # all_gather wants one shape everywhere, so every rank sends as many rows as the longest has.
            padded = torch.zeros(max(tokens), self.experts, device=self.device)
            if chunks:
                padded[: int(local[layer])] = torch.cat(chunks)
            gathered = [torch.empty_like(padded) for _ in range(ranks)]
            dist.all_gather(gathered, padded, group=group)
            self.chunks[layer] = [rows[:count] for rows, count in zip(gathered, tokens, strict=True) if count]

    def check(self) -> None:
        for layer, chunks in enumerate(self.chunks):
            invalid = sum(int((~torch.isfinite(chunk)).sum()) for chunk in chunks)
            if invalid:
                raise ValueError(f"layer {layer}: {invalid} router margins are NaN or infinite: look for NaN in the hidden states")

    def thresholds(self, top_k: int) -> tuple[Tensor, Tensor]:
        tokens = torch.tensor([sum(chunk.shape[0] for chunk in chunks) for chunks in self.chunks], device=self.device)
        nothing = torch.zeros(self.experts, device=self.device)
        rows = [exact_thresholds(torch.cat(chunks), top_k) if chunks else nothing for chunks in self.chunks]
        return tokens, torch.stack(rows)


class _Histogram:
    """Histogram mode: counts per layer, expert and bin over the range that this step's bias allows."""

    def __init__(self, layers: int, experts: int, bins: int, device: torch.device) -> None:
        self.bins = bins
        # int32 halves the all-reduce; a count is at most the tokens of one global batch.
        self.counts = torch.zeros(layers, experts, bins, dtype=torch.int32, device=device)
        self.invalid = torch.zeros(layers, dtype=torch.int64, device=device)
        self.first_bin = torch.arange(experts, dtype=torch.int32, device=device) * bins
        self.begin(torch.zeros(layers, experts, device=device))

    def begin(self, bias: Tensor) -> None:
        self.low = bias.amin(1) - 1.0
        self.width = (bias.amax(1) + 1.0 - self.low) / self.bins
        self.counts.zero_()
        self.invalid.zero_()

    def add(self, layer: int, margins: Tensor) -> None:
        position = margins.sub_(self.low[layer]).div_(self.width[layer])
        # Rounding may carry a margin past an end of the range by a hair; a NaN makes both bounds NaN, which fails both comparisons.
        smallest, largest = torch.aminmax(position)
        self.invalid[layer] += ~((smallest > -1e-2) & (largest < self.bins + 1e-2))
        bins = position.int().clamp_(0, self.bins - 1).add_(self.first_bin)
        self.counts[layer] += torch.bincount(bins.view(-1), minlength=self.counts[layer].numel()).view_as(self.counts[layer])

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        dist.all_reduce(self.counts, group=group)
        dist.all_reduce(self.invalid, group=group)

    def check(self) -> None:
        for layer, invalid in enumerate(self.invalid.tolist()):
            if invalid:
                low, width = float(self.low[layer]), float(self.width[layer])
                raise ValueError(
                    f"layer {layer}: {invalid} micro-batches have router margins that are NaN or outside "
                    f"[{low:.3f}, {low + width * self.bins:.3f}]: look for NaN in the hidden states, or call begin(bias) "
                    "when a run does not start from a bias of zero"
                )

    def thresholds(self, top_k: int) -> tuple[Tensor, Tensor]:
        return histogram_thresholds(self.counts, top_k, self.low, self.width)
