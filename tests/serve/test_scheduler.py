"""The scheduler alone: who gets how many tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.serve.generation import GenerationRequest, SamplingParams
from perilune.serve.scheduler import PREFILL_GRID, Scheduler
from perilune.serve.sequence import Sequence


def sequence(length: int, max_tokens: int = 3) -> Sequence:
    return Sequence(GenerationRequest(tuple([1] * length), SamplingParams(max_tokens=max_tokens)), 100_000)


def carry_out(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """One step as the runner and sampler would do it; the prompt chunks."""
    plan = scheduler.plan()
    for s in plan.decode:
        assert s.num_unseen == 1
        s.see(1, None)
        if s.append(1):
            scheduler.remove(s)
    for chunk in plan.prefill:
        chunk.sequence.see(chunk.count, None)
        if not chunk.sequence.num_unseen and chunk.sequence.append(1):
            scheduler.remove(chunk.sequence)
    return [(c.sequence, c.count) for c in plan.prefill]


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6), budget=st.sampled_from([64, 128, 512]), slots=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_every_prompt_is_read_in_order_within_the_budget_and_cut_on_the_grid_only(lengths, budget, slots):
    scheduler = Scheduler(budget)
    sequences = [sequence(n) for n in lengths]
    for s in sequences:
        scheduler.add(s)
    first_chunks: list[Sequence] = []
    steps = 0
    while scheduler.waiting or scheduler.running:
        while scheduler.waiting and len(scheduler.running) < slots:
            scheduler.admit()
        decoding = [s for s in scheduler.running if s.is_decoding]
        before = {id(s): s.num_sampled for s in decoding}
        starts = {id(s): s.num_seen for s in scheduler.running}
        chunks = carry_out(scheduler)
        assert all(s.num_sampled == before[id(s)] + 1 for s in decoding), "decoding sequences advance in every step"
        assert sum(count for _, count in chunks) <= budget
        for s, count in chunks:
            assert count > 0
            end = starts[id(s)] + count
            assert end % PREFILL_GRID == 0 or end == len(s.request.prompt_ids)
            if starts[id(s)] == 0:
                first_chunks.append(s)
        steps += 1
        assert steps < 10_000
    assert first_chunks == sequences, "first come, first served"


def test_a_long_prompt_does_not_hold_up_those_who_decode():
    scheduler = Scheduler(128)
    short, long = sequence(4, max_tokens=5), sequence(1000)
    for s in (short, long):
        scheduler.add(s)
        scheduler.admit()
    carry_out(scheduler)
    for step in range(1, 5):
        assert short.num_sampled == step
        carry_out(scheduler)
    assert long.num_unseen > 300 and not long.num_sampled


def test_a_short_prompt_does_not_wait_until_a_long_one_before_it_is_read():
    scheduler = Scheduler(128)
    long, short = sequence(2000), sequence(70)
    for s in (long, short):
        scheduler.add(s)
        scheduler.admit()
    assert [count for _, count in carry_out(scheduler)] == [64, 64]
    assert [count for _, count in carry_out(scheduler)] == [64, 6]
    assert short.num_sampled == 1
    assert [count for _, count in carry_out(scheduler)] == [128]


@pytest.mark.parametrize("tokens", [0, 63, 100])
def test_a_budget_off_the_grid_is_refused(tokens):
    with pytest.raises(ValueError, match="multiple of 64"):
        Scheduler(tokens)
