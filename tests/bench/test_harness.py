"""Timing on clocks that the test moves: no assertion here depends on how fast the machine is."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest

from perilune.bench import machine
from perilune.bench.harness import Comparison, Measurement, NotMeasurable, compare, measure, not_installed, ratio_figure, time_figure


class FakeTime:
    """A clock that only the measured functions advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, durations: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.now += next(durations)

        return run


def test_ours_and_the_baseline_alternate() -> None:
    clock = FakeTime()
    compare(clock.work("A", repeat(0.05)), clock.work("B", repeat(0.05)), clock=clock, min_pairs=30)
    assert "".join(clock.log[-60:]) == "AB" * 30


def test_a_slice_holds_as_many_calls_as_fit_and_at_least_one() -> None:
    clock = FakeTime()
    compare(clock.work("A", repeat(0.01)), clock.work("B", repeat(3.0)), clock=clock, min_pairs=4, slice_s=0.05)
    assert "".join(clock.log).endswith("AAAAAB" * 4)


def test_the_warm_up_is_not_measured() -> None:
    clock = FakeTime()
    result = compare(clock.work("A", chain([9.0], repeat(0.05))), clock.work("B", repeat(0.1)), clock=clock)
    assert isinstance(result, Comparison)
    assert max(result.ours.seconds) == pytest.approx(0.05)


def test_the_figure_is_the_median_of_pairwise_ratios_so_a_slow_phase_does_not_count() -> None:
    clock = FakeTime()
    warm_up = [0.05] * 2
    pace = [1.0] * 20 + [4.0] * 10  # for the last ten pairs the whole machine is four times slower
    ours = clock.work("A", chain(warm_up, [0.05 * slowness for slowness in pace]))
    baseline = clock.work("B", chain(warm_up, [0.15 * slowness for slowness in pace]))
    result = compare(ours, baseline, clock=clock, min_pairs=30)
    assert isinstance(result, Comparison)
    assert result.speedup == pytest.approx(3.0)
    assert result.best_decile_speedup == pytest.approx(3.0)
    assert len(result.speedups) == 30


def test_a_ratio_figure_says_what_was_compared() -> None:
    comparison = Comparison(Measurement((1.0, 2.0, 1.0)), Measurement((3.0, 4.0, 4.0)))
    figure = ratio_figure("fast_over_slow", comparison, baseline="slow", shape="T8", goal=2.5, needs="avx2")
    assert (figure.value, figure.ours, figure.baseline_value, figure.runs) == (3.0, 1.0, 4.0, 3)
    assert figure.spread == pytest.approx((2.2, 3.8))
    assert figure.verdict() == "met"


def test_a_ratio_that_should_be_low_is_ours_over_the_baseline() -> None:
    comparison = Comparison(Measurement((1.0,) * 4), Measurement((4.0,) * 4))
    figure = ratio_figure("create_over_peer", comparison, baseline="peer", goal=0.2, better="lower")
    assert figure.value == pytest.approx(0.25)
    assert figure.verdict() == "missed"


def test_an_absolute_time_is_the_median_of_thirty_runs_in_the_units_of_its_goal() -> None:
    clock = FakeTime()
    result = measure(clock.work("A", chain([5.0], repeat(0.002, 29), [0.7])), clock=clock)
    figure = time_figure("command_cpu_ms", result, unit="ms", goal=6)
    assert (figure.value, figure.unit, figure.runs, figure.verdict()) == (pytest.approx(2.0), "ms", 30, "met")
    assert figure.ours == pytest.approx(0.002)


def test_a_call_of_over_a_second_is_run_five_times() -> None:
    clock = FakeTime()
    result = measure(clock.work("A", repeat(2.0)), clock=clock)
    assert isinstance(result, Measurement)
    assert len(result.seconds) == 5


@pytest.mark.parametrize(("load", "measurable"), [(0.0, True), (0.49, True), (0.5, False), (3.0, False)])
def test_wall_time_is_measured_only_on_a_quiet_machine(monkeypatch: pytest.MonkeyPatch, load: float, measurable: bool) -> None:
    monkeypatch.setattr(machine, "load_before", lambda: load)

    def work() -> int:
        return sum(range(2000))

    results = (measure(work, runs=3, clock="wall"), compare(work, work, min_pairs=2, slice_s=1e-4, clock="wall"))
    assert [isinstance(result, NotMeasurable) for result in results] == [not measurable] * 2


def test_a_busy_machine_gives_figures_that_say_so() -> None:
    figures = [
        ratio_figure("speedup", NotMeasurable(2.0), baseline="one thread", goal=1.8),
        time_figure("start", NotMeasurable(2.0), goal=1),
    ]
    assert [(figure.value, figure.verdict(), figure.runs) for figure in figures] == [("not measurable", "not measurable", 0)] * 2


def test_processor_time_does_not_care_about_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "load_before", lambda: 64.0)
    assert isinstance(measure(lambda: sum(range(2000)), runs=3), Measurement)


def test_a_missing_peer_is_reported_and_not_left_out() -> None:
    figure = not_installed("prefill_over_llamacpp", goal=1.0)
    assert (figure.value, figure.baseline, figure.verdict()) == (None, "not installed", "not installed")


def test_a_clock_that_stands_still_is_an_error_and_not_a_division_by_zero() -> None:
    with pytest.raises(ValueError, match="did not advance"):
        measure(lambda: None, clock=lambda: 1.0)
