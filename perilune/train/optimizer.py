"""Which parameter is trained by what: per-head Muon for matrices, AdamW for the rest, behind one object; gradient clipping.

The model says what each parameter is (`ParameterRole`); this file turns roles into optimizers. AdamW runs torch's fused
implementation: on one CPU thread it is 3.3 times as fast as foreach on 250 small tensors and 4.1 times as fast as the plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from perilune.errors import UserError
from perilune.train.muon import MatrixParameter, Muon

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerSettings(BaseModel):
    """The `[optimizer]` table of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["muon", "adamw"] = Field(
        "muon", description="muon: per-head Muon for matrices and AdamW for the rest; adamw: AdamW for everything"
    )
    learning_rate: float = Field(2e-3, gt=0.0, allow_inf_nan=False, description="peak learning rate, for both optimizers")
    weight_decay: float = Field(0.1, ge=0.0, allow_inf_nan=False, description="decoupled weight decay")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW: decay of the first and second moment")
    eps: float = Field(1e-8, gt=0.0, description="AdamW: added to the root of the second moment")
    momentum: float = Field(0.95, ge=0.0, lt=1.0, description="Muon: Nesterov momentum")
    newton_schulz_steps: int = Field(5, ge=1, description="Muon: iterations of the orthogonalisation")
    newton_schulz_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Muon: dtype of the orthogonalisation; bfloat16 for GPUs"
    )
    clip_norm: float | None = Field(1.0, gt=0.0, description="largest global gradient norm; leave the gradient alone without it")


@dataclass(frozen=True)
class ParameterRole:
    """What a parameter is to the optimizer.

    matrix     a linear map, `[rows, columns]` or stacked `[..., rows, columns]`; `heads` splits its rows for per-head Muon
    embedding  token embedding or output head: one row per token, so orthogonalising it would mix unrelated rows
    vector     norms, biases, decay parameters, short convolutions, residual projections: no matrix to orthogonalise
    """

    kind: Literal["matrix", "embedding", "vector"]
    heads: int | None = None
    weight_decay: bool = True

    def __post_init__(self) -> None:
        if self.heads is not None and self.kind != "matrix":
            raise ValueError(f"heads are for matrices, got {self.heads} for a parameter of kind {self.kind}")


class Optimizers:
    """The optimizers of one model, used like one. Made by `build_optimizers`."""

    def __init__(self, kind: str, parts: Mapping[str, torch.optim.Optimizer], names: Mapping[str, list[str]]) -> None:
        self.kind = kind
        self._parts = dict(parts)
        self._names = dict(names)
        self._peak_rates = {part: [group["lr"] for group in optimizer.param_groups] for part, optimizer in self._parts.items()}

    def step(self) -> None:
        for optimizer in self._parts.values():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._parts.values():
            optimizer.zero_grad(set_to_none=True)

    def set_learning_rate(self, factor: float) -> None:
        """Use `factor` times the peak learning rate from the next step on."""
        for part, optimizer in self._parts.items():
            for group, peak in zip(optimizer.param_groups, self._peak_rates[part], strict=True):
                group["lr"] = peak * factor

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts with the names they belong to; loads with `torch.load(weights_only=True)`."""
        return {
            "kind": self.kind,
            "parts": {part: {"names": self._names[part], "state": optimizer.state_dict()} for part, optimizer in self._parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take moments and step counts from `state`; learning rate, decay and the like stay those of today's settings.

        Raises UserError when the state belongs to another optimizer or another model.
        """
        if state["kind"] != self.kind:
            raise UserError(
                f"The checkpoint was made with optimizer kind {state['kind']!r}, not {self.kind!r}: set it back, or start a new run."
            )
        saved_names = {part: saved["names"] for part, saved in state["parts"].items()}
        if saved_names != self._names:
            saved = {name for names in saved_names.values() for name in names}
            own = {name for names in self._names.values() for name in names}
            difference = sorted(saved ^ own) or ["roles"]
            raise UserError(
                f"The checkpoint's optimizer belongs to another model (they differ in {difference[0]}): use the model it was made with."
            )
        for part, optimizer in self._parts.items():
            today = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            try:
                optimizer.load_state_dict(state["parts"][part]["state"])
            except ValueError as error:
                raise UserError(f"The checkpoint's optimizer belongs to another model: {error}.") from error
            for group, options in zip(optimizer.param_groups, today, strict=True):
                group.update(options)


def build_optimizers(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], roles: Mapping[str, ParameterRole], settings: OptimizerSettings
) -> Optimizers:
    """Optimizers for all parameters that require gradients. Every such parameter needs a role under its name and every role a parameter.

    Raises ValueError when names and roles do not match, or a matrix role does not fit the parameter's shape.
    """
    trained = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
    if set(trained) - set(roles):
        raise ValueError(f"parameters without a role: {sorted(set(trained) - set(roles))}")
    if set(roles) - set(trained):
        raise ValueError(f"roles without a parameter: {sorted(set(roles) - set(trained))}")
    if not trained:
        raise ValueError("no parameter requires a gradient")
    names: dict[str, list[str]] = {}
    parts: dict[str, torch.optim.Optimizer] = {}

    matrices = [name for name in trained if settings.kind == "muon" and roles[name].kind == "matrix"]
    for decayed in (True, False):
        chosen = [name for name in matrices if roles[name].weight_decay == decayed]
        if chosen:
            part = "muon" if decayed else "muon_without_decay"
            names[part] = chosen
            parts[part] = Muon(
                [MatrixParameter(trained[name], roles[name].heads) for name in chosen],
                settings.learning_rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay if decayed else 0.0,
                newton_schulz_steps=settings.newton_schulz_steps,
                orthogonalise_dtype=getattr(torch, settings.newton_schulz_dtype),
            )

    rest = [name for name in trained if name not in set(matrices)]
    if rest:
        with_decay = [name for name in rest if roles[name].weight_decay]
        without_decay = [name for name in rest if not roles[name].weight_decay]
        groups = [([trained[name] for name in with_decay], settings.weight_decay), ([trained[name] for name in without_decay], 0.0)]
        names["adamw"] = with_decay + without_decay
        parts["adamw"] = torch.optim.AdamW(
            [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
    return Optimizers(settings.kind, parts, names)


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm`, and return the norm before that.

    A norm that is not finite is returned with the gradients untouched: the caller must not step. None only measures.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32 if gradients[0].dtype != torch.float64 else None)
    total = float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))
    if max_norm is not None and math.isfinite(total) and total > max_norm:
        torch._foreach_mul_(gradients, max_norm / total)
    return total
