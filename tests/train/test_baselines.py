"""Bits per byte and the unigram baseline."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.train.baselines import UnigramModel, bits_per_byte, count_target_bytes, unigram_bits_per_byte


def test_a_uniform_guess_over_bytes_costs_eight_bits_per_byte() -> None:
    assert bits_per_byte(10 * math.log(256), 10) == pytest.approx(8.0)
    with pytest.raises(ValueError, match="at least one byte"):
        bits_per_byte(1.0, 0)


def test_an_unseen_token_gets_one_count_of_add_one_smoothing() -> None:
    model = UnigramModel.fit(np.array([[0, 0], [1, -100]]), vocab_size=3)
    np.testing.assert_allclose(np.exp(model.log_probabilities), [3 / 6, 2 / 6, 1 / 6])
    assert model.negative_log_likelihood(np.array([0, 2, -100])) == pytest.approx(-math.log(3 / 6) - math.log(1 / 6))


@given(st.lists(st.integers(0, 7), max_size=50))
def test_probabilities_sum_to_one_and_none_is_zero(tokens: list[int]) -> None:
    probabilities = np.exp(UnigramModel.fit(np.array(tokens, np.int32), 8).log_probabilities)
    assert probabilities.sum() == pytest.approx(1.0) and probabilities.min() > 0.0


def test_the_unigram_model_approaches_the_entropy_of_its_text() -> None:
    tokens = np.tile([0, 0, 1, 2], 5000)  # entropy 1.5 bits per token
    assert unigram_bits_per_byte(tokens, tokens, 4, held_out_bytes=len(tokens)) == pytest.approx(1.5, abs=1e-3)
    assert unigram_bits_per_byte(tokens, tokens, 4, held_out_bytes=2 * len(tokens)) == pytest.approx(0.75, abs=1e-3)


def test_target_bytes_leave_out_ignored_targets_and_special_tokens() -> None:
    bytes_per_token = [1, 3, 0]
    assert count_target_bytes(np.array([[0, 1, -100], [2, 1, 0]]), bytes_per_token) == 8
    assert count_target_bytes(np.array([-100]), bytes_per_token) == 0


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a vocabulary of 3"):
        UnigramModel.fit(np.array([3]), 3)
