"""Learning-rate schedules as pure functions of the step.

Steps count from 0; `factor(step)` multiplies the peak learning rate for the update made in that step. Warm-up ends at the peak and never
starts at 0, because an update with rate 0 is a wasted batch. The last step has the floor; later steps keep it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ScheduleSettings(BaseModel):
    """The `[schedule]` table of a recipe. The default is the Kimi K3 report's: cosine with 1 % linear warm-up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["cosine", "wsd"] = Field("cosine", description="cosine, or warm-up, stable, decay")
    warmup_fraction: float = Field(0.01, ge=0.0, lt=1.0, description="share of all steps spent rising linearly to the peak")
    floor: float = Field(0.0, ge=0.0, le=1.0, description="learning rate of the last step, as a share of the peak")
    decay_fraction: float = Field(0.2, gt=0.0, le=1.0, description="wsd: share of all steps spent decaying, at the end")
    decay_shape: Literal["linear", "1-sqrt"] = Field("linear", description="wsd: shape of the decay")

    @model_validator(mode="after")
    def _check_that_every_field_is_read(self) -> ScheduleSettings:
        if self.kind != "wsd":
            for name in ("decay_fraction", "decay_shape"):
                if name in self.model_fields_set:
                    raise ValueError(f"{name} is read only when kind is wsd, and kind is {self.kind}: remove it")
        elif self.warmup_fraction + self.decay_fraction > 1.0:
            raise ValueError(f"warm-up ({self.warmup_fraction}) and decay ({self.decay_fraction}) take more than all steps: lower one")
        return self


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up over `warmup_steps`, then half a cosine from the peak down to `floor` at step `total_steps - 1`."""

    total_steps: int
    warmup_steps: int
    floor: float

    def factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = _progress(step, self.warmup_steps, self.total_steps)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WarmupStableDecaySchedule:
    """Linear warm-up, the peak, and over the last `decay_steps` a decay to `floor` (Hu et al. 2024; 1-sqrt: Haegele et al. 2024)."""

    total_steps: int
    warmup_steps: int
    decay_steps: int
    floor: float
    decay_shape: Literal["linear", "1-sqrt"]

    def factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        start = self.total_steps - self.decay_steps
        if step < start:
            return 1.0
        # The first decaying step is already below the peak, so the progress there is one step's worth, not 0.
        progress = _progress(step, start - 1, self.total_steps)
        remaining = 1.0 - (progress if self.decay_shape == "linear" else math.sqrt(progress))
        return self.floor + (1.0 - self.floor) * remaining


Schedule = CosineSchedule | WarmupStableDecaySchedule


def _progress(step: int, first: int, total_steps: int) -> float:
    """0 at step `first`, 1 at the last step and after it."""
    last = total_steps - 1
    return 1.0 if step >= last else (step - first) / (last - first)


def build_schedule(settings: ScheduleSettings, total_steps: int) -> Schedule:
    """The schedule for a run of `total_steps`. Shares are rounded to whole steps; a share above 0 keeps at least one where a step is left.

    Raises ValueError when `total_steps` is not positive.
    """
    if total_steps < 1:
        raise ValueError(f"a run needs at least one step, got {total_steps}")
    warmup_steps = min(_steps(settings.warmup_fraction, total_steps), total_steps - 1)
    if settings.kind == "cosine":
        return CosineSchedule(total_steps, warmup_steps, settings.floor)
    decay_steps = min(_steps(settings.decay_fraction, total_steps), total_steps - warmup_steps)
    return WarmupStableDecaySchedule(total_steps, warmup_steps, decay_steps, settings.floor, settings.decay_shape)


def _steps(fraction: float, total_steps: int) -> int:
    return max(1, round(fraction * total_steps)) if fraction > 0.0 else 0
