"""Learning-rate schedules."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perilune.train.schedule import CosineSchedule, ScheduleSettings, WarmupStableDecaySchedule, build_schedule

schedule_settings = st.one_of(
    st.builds(ScheduleSettings, kind=st.just("cosine"), warmup_fraction=st.floats(0, 0.9), floor=st.floats(0, 1)),
    st.builds(
        ScheduleSettings,
        kind=st.just("wsd"),
        warmup_fraction=st.floats(0, 0.5),
        floor=st.floats(0, 1),
        decay_fraction=st.floats(0.01, 0.5),
        decay_shape=st.sampled_from(["linear", "1-sqrt"]),
    ),
)


@given(schedule_settings, st.integers(1, 300))
def test_the_rate_rises_to_the_peak_and_never_again_until_it_ends_at_the_floor(settings: ScheduleSettings, total_steps: int) -> None:
    schedule = build_schedule(settings, total_steps)
    factors = [schedule.factor(step) for step in range(total_steps + 3)]
    assert all(settings.floor - 1e-12 <= factor <= 1.0 for factor in factors[schedule.warmup_steps :])
    assert all(0.0 < factor <= 1.0 for factor in factors[: schedule.warmup_steps])
    rising, falling = factors[: schedule.warmup_steps], factors[schedule.warmup_steps :]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    if rising:
        assert rising[-1] == 1.0
    assert factors[total_steps - 1 :] == pytest.approx([settings.floor] * 4)


def test_the_default_is_cosine_with_one_percent_warm_up() -> None:
    assert build_schedule(ScheduleSettings(), 1000) == CosineSchedule(total_steps=1000, warmup_steps=10, floor=0.0)


def test_cosine_values() -> None:
    schedule = CosineSchedule(total_steps=13, warmup_steps=4, floor=0.1)
    assert [schedule.factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.factor(8) == pytest.approx(0.55)
    assert schedule.factor(6) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule.factor(12) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("shape", "remaining"), [("linear", [0.75, 0.5, 0.25, 0.0]), ("1-sqrt", [0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0])]
)
def test_wsd_values(shape: str, remaining: list[float]) -> None:
    settings = ScheduleSettings.model_validate(
        {"kind": "wsd", "warmup_fraction": 0.2, "decay_fraction": 0.4, "decay_shape": shape, "floor": 0.5}
    )
    schedule = build_schedule(settings, 10)
    assert schedule == WarmupStableDecaySchedule(10, 2, 4, 0.5, schedule.decay_shape)  # type: ignore[union-attr]
    assert [schedule.factor(step) for step in range(6)] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert [schedule.factor(step) for step in range(6, 10)] == pytest.approx([0.5 + 0.5 * value for value in remaining])


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "wsd", "warmup_fraction": 0.5, "decay_fraction": 0.6},
        {"kind": "cosine", "decay_fraction": 0.1},
        {"kind": "step"},
        {"warmup": 0.1},
        {"floor": 1.1},
        {"warmup_fraction": 1.0},
    ],
)
def test_contradictory_settings_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ScheduleSettings.model_validate(fields)


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        build_schedule(ScheduleSettings(), 0)
