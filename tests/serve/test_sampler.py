"""The sampler against a slow twin that reads like the definition, row by row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import UserError
from perilune.serve import sampler
from perilune.serve.generation import SamplingParams
from perilune.serve.sampler import Draw, sample

VOCABULARY = 12


def slow_sample(logits: list[float], draw: Draw) -> int:
    """softmax(logits / temperature); the top_k likeliest; of these the fewest that hold top_p; the uniform number inverted over
    what is left: in falling order if anything was cut, in order of id otherwise. Ties: the lower id first."""
    params = draw.params
    largest = max(logits)
    if params.temperature == 0:
        return logits.index(largest)
    weights = [math.exp((x - largest) / params.temperature) for x in logits]
    order = list(range(len(weights)))
    if params.top_k or params.top_p < 1:
        order.sort(key=lambda i: (-weights[i], i))
        order = order[: params.top_k or None]
        if params.top_p < 1:
            total, held, kept = math.fsum(weights[i] for i in order), 0.0, []
            for i in order:
                if kept and held >= params.top_p * total:
                    break
                kept.append(i)
                held += weights[i]
            order = kept
    total, held = math.fsum(weights[i] for i in order), 0.0
    for i in order:
        held += weights[i]
        if held > draw.uniform() * total:
            return i
    raise AssertionError("the uniform number is below 1")


draws = st.builds(
    Draw,
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-300, 0.05, 0.7, 1.0, 30.0]),
        top_p=st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]),
        top_k=st.integers(0, VOCABULARY + 3) | st.just(10**30),
        top_logprobs=st.integers(0, 20),
    ),
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**40),
)
rows = st.lists(st.floats(-30, 30, width=32), min_size=VOCABULARY, max_size=VOCABULARY)


@given(batch=st.lists(st.tuples(rows, draws), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_every_row_of_a_batch_is_sampled_as_the_definition_says(batch):
    logits = torch.tensor([row for row, _ in batch], dtype=torch.float32)
    result = sample(logits, [draw for _, draw in batch])
    logprobs = torch.log_softmax(logits.double(), -1)
    for i, (row, draw) in enumerate(batch):
        assert result.ids[i] == slow_sample(row, draw)
        assert result.logprobs[i] == pytest.approx(float(logprobs[i, result.ids[i]]), abs=1e-4)
        count = min(draw.params.top_logprobs, VOCABULARY)
        assert [value for _, value in result.top[i]] == pytest.approx(sorted(logprobs[i].tolist(), reverse=True)[:count], abs=1e-4)
        assert all(value == pytest.approx(float(logprobs[i, token]), abs=1e-4) for token, value in result.top[i])
        assert len({token for token, _ in result.top[i]}) == count


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("has_ties", [False, True])
def test_a_large_vocabulary_is_cut_without_sorting_it_and_gives_what_sorting_gives(spread, has_ties):
    """Flat rows, whose cut lies beyond the candidates, peaked ones, and rows full of equal logits."""
    random = torch.Generator().manual_seed(0)
    size = 20 * sampler._CANDIDATES
    logits = spread * torch.randn(48, size, generator=random)
    if has_ties:
        logits = (logits * 4).round() / 4
    cuts = [(p, k) for p in (0.01, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0) for k in (0, 1, 40, 255, 256, 1000, size - 1) if p < 1 or k]
    draws = [Draw(SamplingParams(top_p=p, top_k=k), seed, 3) for seed, (p, k) in enumerate(cuts)]
    weights = sampler._weights(logits, [1.0] * 48)
    assert torch.equal(sampler._sample_cut(weights, draws), sampler._sample_sorted(weights, draws))


def test_peaked_rows_of_a_large_vocabulary_are_not_sorted(monkeypatch):
    monkeypatch.setattr(sampler, "_sample_sorted", lambda weights, draws: pytest.fail("a row was sorted"))
    logits = 5 * torch.randn(8, 5000, generator=torch.Generator().manual_seed(1))
    sample(logits, [Draw(SamplingParams(top_p=0.9, top_k=50 * (i % 2)), i, 0) for i in range(8)])


def test_of_equal_logits_the_lowest_ids_are_listed_and_greedy_takes_the_first():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 2.0, 0.0]]).repeat(1, 1)
    result = sample(logits, [Draw(SamplingParams(temperature=0, top_logprobs=4), 0, 0)])
    assert result.ids == [1] and [token for token, _ in result.top[0]] == [1, 2, 3, 4]


def test_sampled_frequencies_are_the_models_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 4000
    result = sample(logits.expand(count, 4), [Draw(SamplingParams(), seed=7, position=i) for i in range(count)])
    seen = torch.bincount(torch.tensor(result.ids), minlength=4) / count
    probabilities = logits.softmax(0)
    # Five standard deviations of a binomial: a wrong distribution is far outside.
    assert ((seen - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / count).sqrt()).all()


def test_ids_beyond_the_tokenizers_are_never_sampled_nor_listed_but_count_in_the_probabilities():
    logits = torch.tensor([[1.0, 2.0, 9.0, 9.0]])
    for params in (SamplingParams(temperature=0, top_logprobs=4), SamplingParams(top_logprobs=4), SamplingParams(top_k=4, top_logprobs=4)):
        for position in range(20):
            result = sample(logits, [Draw(params, 0, position)], 2)
            assert result.ids[0] < 2 and [token for token, _ in result.top[0]] == [1, 0]
            assert result.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[0, result.ids[0]]))


def test_the_random_number_depends_on_seed_and_position_and_on_both():
    params = SamplingParams()
    numbers = {Draw(params, seed, position).uniform() for seed in (-1, 0, 1, 2**63) for position in (0, 1, 2, 1000)}
    assert len(numbers) == 16
    assert Draw(params, 5, 9).uniform() == Draw(SamplingParams(temperature=0.3), 5, 9).uniform()
    assert all(0 <= n < 1 for n in numbers)


def test_a_uniform_number_at_the_very_end_still_gives_a_token_that_has_weight(monkeypatch):
    monkeypatch.setattr(Draw, "uniform", lambda self: math.nextafter(1.0, 0.0))
    logits = torch.tensor([[0.0, 3.0, 1.0, -2000.0]])
    assert sample(logits, [Draw(SamplingParams(), 0, 0)]).ids == [2]
    assert sample(logits, [Draw(SamplingParams(top_k=2), 0, 0)]).ids == [2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.01),
        ("top_p", math.nan), ("top_k", -1), ("seed", -1), ("top_logprobs", 21), ("top_logprobs", -1),
    ],
)  # fmt: skip
def test_a_value_outside_its_range_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=rf"^{field} is {value}: it must be "):
        SamplingParams(**{field: value})
