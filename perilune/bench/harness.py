"""Timing: ours and its baseline in alternation, and single operations, as the figures of a report.

Rates of one machine wander (clock boost, neighbours, a matrix unit that slows down for seconds), so a comparison runs A B A B … in
short slices and its figure is the median of the pairwise ratios. Single-threaded work is timed in process CPU time. Wall time is
taken only when the load before the run was below 0.5; otherwise the figure is "not measurable".
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy

from perilune.bench import machine
from perilune.bench.report import NOT_INSTALLED, NOT_MEASURABLE, Figure, Need

__all__ = ["Comparison", "Figure", "Measurement", "NotMeasurable", "compare", "measure", "not_installed", "ratio_figure", "time_figure"]

Clock = Literal["cpu", "wall"]

BUSY_LOAD = 0.5
_CLOCKS: dict[Clock, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


@dataclass(frozen=True)
class NotMeasurable:
    """Stands for a wall-time result on a machine that was busy before the run; `load` is what it was."""

    load: float


@dataclass(frozen=True)
class Measurement:
    """Seconds per call, one entry a run, in the order of measurement."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(numpy.median(self.seconds))

    @property
    def best_decile(self) -> float:
        """The 10th percentile: the rate when nothing disturbed."""
        return float(numpy.quantile(self.seconds, 0.1))

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile."""
        return _spread(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """Ours and the baseline, slice by slice: `ours.seconds[i]` was taken right before `baseline.seconds[i]`."""

    ours: Measurement
    baseline: Measurement

    @property
    def speedups(self) -> tuple[float, ...]:
        """Baseline time over our time, pair by pair: above 1, ours is faster."""
        return tuple(theirs / own for own, theirs in zip(self.ours.seconds, self.baseline.seconds, strict=True))

    @property
    def speedup(self) -> float:
        """The median of the pairwise ratios."""
        return float(numpy.median(self.speedups))

    @property
    def best_decile_speedup(self) -> float:
        return self.baseline.best_decile / self.ours.best_decile


def compare(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    *,
    min_pairs: int = 30,
    slice_s: float = 0.05,
    clock: Clock | Callable[[], float] = "cpu",
) -> Comparison | NotMeasurable:
    """Times two callables in alternation, after a warm-up, in `min_pairs` pairs of slices of about `slice_s` seconds (at least one call).

    `clock` is "cpu" (process CPU time), "wall", or a function that returns seconds.
    """
    load = _too_busy(clock)
    if load is not None:
        return NotMeasurable(load)
    now = _timer(clock)
    our_calls = _calls_per_slice(ours, slice_s, now)
    baseline_calls = _calls_per_slice(baseline, slice_s, now)
    pairs = [(_seconds_per_call(ours, our_calls, now), _seconds_per_call(baseline, baseline_calls, now)) for _ in range(min_pairs)]
    own, theirs = zip(*pairs, strict=True)
    return Comparison(Measurement(own), Measurement(theirs))


def measure(function: Callable[[], object], *, runs: int = 30, clock: Clock | Callable[[], float] = "cpu") -> Measurement | NotMeasurable:
    """Times single calls after one to warm up. A call that lasts over a second is run min(runs, 5) times."""
    load = _too_busy(clock)
    if load is not None:
        return NotMeasurable(load)
    now = _timer(clock)
    function()
    seconds = [_seconds_per_call(function, 1, now)]
    wanted = min(runs, 5) if seconds[0] > 1 else runs
    while len(seconds) < wanted:
        seconds.append(_seconds_per_call(function, 1, now))
    return Measurement(tuple(seconds))


def ratio_figure(
    name: str,
    comparison: Comparison | NotMeasurable,
    *,
    baseline: str,
    shape: str = "",
    goal: float | None = None,
    needs: Need | None = None,
    better: Literal["higher", "lower"] = "higher",
) -> Figure:
    """A figure from a comparison: baseline time over ours when higher is better, ours over the baseline when lower is."""
    if isinstance(comparison, NotMeasurable):
        return Figure(name, NOT_MEASURABLE, "ratio", better, shape, goal, baseline=baseline, runs=0, needs=needs)

    def oriented(speedup: float) -> float:
        return speedup if better == "higher" else 1 / speedup

    return Figure(
        name=name,
        value=oriented(comparison.speedup),
        unit="ratio",
        better=better,
        shape=shape,
        goal=goal,
        ours=comparison.ours.median,
        baseline=baseline,
        baseline_value=comparison.baseline.median,
        spread=_spread([oriented(speedup) for speedup in comparison.speedups]),
        runs=len(comparison.speedups),
        best_deciles=oriented(comparison.best_decile_speedup),
        needs=needs,
    )


def time_figure(
    name: str,
    measurement: Measurement | NotMeasurable,
    *,
    shape: str = "",
    unit: Literal["s", "ms", "us"] = "s",
    goal: float | None = None,
    needs: Need | None = None,
) -> Figure:
    """An absolute time, the median over the runs, in `unit` (as is `goal`)."""
    if isinstance(measurement, NotMeasurable):
        return Figure(name, NOT_MEASURABLE, unit, "lower", shape, goal, runs=0, needs=needs)
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    low, high = measurement.spread
    return Figure(
        name=name,
        value=measurement.median * scale,
        unit=unit,
        better="lower",
        shape=shape,
        goal=goal,
        ours=measurement.median,
        spread=(low * scale, high * scale),
        runs=len(measurement.seconds),
        best_deciles=measurement.best_decile * scale,
        needs=needs,
    )


def not_installed(
    name: str,
    *,
    shape: str = "",
    unit: str = "ratio",
    goal: float | None = None,
    needs: Need | None = None,
    better: Literal["higher", "lower"] = "higher",
) -> Figure:
    """A figure whose baseline is an outside program that is not here: reported, never left out."""
    return Figure(name, None, unit, better, shape, goal, baseline=NOT_INSTALLED, runs=0, needs=needs)


def _timer(clock: Clock | Callable[[], float]) -> Callable[[], float]:
    return clock if callable(clock) else _CLOCKS[clock]


def _too_busy(clock: Clock | Callable[[], float]) -> float | None:
    load = machine.load_before() if clock == "wall" else 0.0
    return load if load >= BUSY_LOAD else None


def _seconds_per_call(function: Callable[[], object], calls: int, now: Callable[[], float]) -> float:
    start = now()
    for _ in range(calls):
        function()
    elapsed = now() - start
    if elapsed <= 0:
        raise ValueError(f"the clock did not advance over {calls} calls: use longer slices")
    return elapsed / calls


def _calls_per_slice(function: Callable[[], object], slice_s: float, now: Callable[[], float]) -> int:
    """Warms up, doubling the calls until they fill a fifth of a slice, and says how many calls fit a whole one (at least 1)."""
    function()
    calls = 1
    while True:
        start = now()
        for _ in range(calls):
            function()
        elapsed = now() - start
        if elapsed >= slice_s / 5 or calls >= 2**20:
            return max(1, int(slice_s * calls / max(elapsed, 1e-9)))
        calls *= 2


def _spread(values: tuple[float, ...] | list[float]) -> tuple[float, float]:
    low, high = numpy.quantile(values, (0.1, 0.9))
    return float(low), float(high)
