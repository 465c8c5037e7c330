"""The router's selection bias between steps: what the layers' routings say goes in, the next step's bias comes out."""

import torch
from torch import Tensor

from perilune.model.decoder import Decoder
from perilune.model.latent_moe import LatentMoE
from perilune.moe.balance_metrics import BalanceMetrics, balance_metrics, expert_loads
from perilune.moe.quantile import Mode, QuantileBalancer, sign_update
from perilune.moe.router import Routing
from perilune.train.parallel import Ranks
from perilune.train.recipe import BalanceSettings


class RouterBalance:
    """Watches one training step's routings (`observe` is the model's observer) and sets the biases after it (`finish_step`).

    The bias of a step is computed from the step before (K3 report, section on Quantile Balancing), over all micro-batches and ranks.
    """

    def __init__(self, model: Decoder, settings: BalanceSettings, ranks: Ranks) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, LatentMoE)]
        self._experts = model.config.num_experts
        self._settings, self._ranks = settings, ranks
        self._loads = torch.zeros(len(self._layers), self._experts, dtype=torch.int64)
        self._quantile: QuantileBalancer | None = None
        if settings.rule in ("quantile", "histogram") and self._layers:
            mode: Mode = "exact" if settings.rule == "quantile" else "histogram"
            self._quantile = QuantileBalancer(
                len(self._layers), self._experts, model.config.num_experts_per_token, mode=mode, num_bins=settings.bins
            )
        self.begin()

    def begin(self) -> None:
        """Start a step from the biases the layers have now: at the start of a run and after a checkpoint is restored."""
        self._loads.zero_()
        if self._quantile is not None:
            self._quantile.begin(self._biases())

    def _biases(self) -> Tensor:
        return torch.stack([layer.selection_bias for layer in self._layers])

    def observe(self, layer: int, routing: Routing) -> None:
        self._loads[layer] += expert_loads(routing.experts, self._experts)
        if self._quantile is not None:
            assert routing.cutoff is not None
            self._quantile.observe(layer, routing.scores.detach(), routing.cutoff)

    @torch.no_grad()
    def finish_step(self) -> BalanceMetrics:
        """Set every layer's bias for the next step and forget this one; returns how even this step's loads were."""
        if not self._layers:
            return BalanceMetrics((), (), ())
        loads = self._ranks.sum(self._loads)
        metrics = balance_metrics(loads)
        for layer, bias in zip(self._layers, self._next_biases(self._biases(), loads), strict=True):
            layer.selection_bias.copy_(bias)
        self._loads = torch.zeros_like(loads)
        return metrics

    def _next_biases(self, biases: Tensor, loads: Tensor) -> Tensor:
        if self._quantile is not None:
            self._quantile.reduce()
            return self._quantile.update(biases)
        if self._settings.rule == "sign":
            return sign_update(biases, loads, self._settings.gamma)
        return biases
