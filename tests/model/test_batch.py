"""The layout's promises, and that attention's buckets hold every sequence once with little padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.model import batch
from perilune.model.batch import SequenceLayout, attention_buckets

SEQUENCES = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=40)


@given(SEQUENCES)
@settings(max_examples=200, deadline=None)
def test_every_sequence_with_tokens_is_in_exactly_one_bucket_that_fits_it(sequences):
    layout = SequenceLayout(tuple(n for n, _ in sequences), tuple(c for _, c in sequences))
    buckets = attention_buckets(layout)
    assert sorted(i for b in buckets for i in b.members) == [i for i, n in enumerate(layout.lengths) if n]
    for bucket in buckets:
        assert bucket.queries == max(layout.lengths[i] for i in bucket.members)
        assert bucket.keys == max(layout.lengths[i] + layout.contexts[i] for i in bucket.members)


@given(SEQUENCES)
@settings(max_examples=200, deadline=None)
def test_padding_stays_within_a_quarter_of_the_work_or_is_negligible(sequences):
    layout = SequenceLayout(tuple(n for n, _ in sequences), tuple(c for _, c in sequences))
    for bucket in attention_buckets(layout):
        work = sum(layout.lengths[i] * (layout.lengths[i] + layout.contexts[i]) for i in bucket.members)
        assert len(bucket.members) * bucket.queries * bucket.keys <= 1.25 * work + batch._FREE_PADDING


def test_equal_sequences_share_one_bucket_and_very_unequal_ones_do_not():
    assert len(attention_buckets(SequenceLayout((500,) * 8))) == 1
    buckets = attention_buckets(SequenceLayout((2000, *[10] * 20)))
    assert [sorted(b.members) for b in buckets] == [[0], list(range(1, 21))]
    assert buckets[0].queries == 2000
    assert buckets[1].queries == 10


def test_decoding_after_one_long_context_does_not_pad_the_short_ones_to_it():
    buckets = attention_buckets(SequenceLayout((1,) * 9, (100_000, *[50] * 8)))
    assert sorted(b.keys for b in buckets) == [51, 100_001]


def test_counts_and_decode_are_read_off_the_lengths():
    layout = SequenceLayout((3, 0, 1))
    assert (layout.num_tokens, layout.num_sequences, layout.is_decode) == (4, 3, False)
    assert layout.contexts == (0, 0, 0)
    assert layout.slots == ()
    assert SequenceLayout((1, 1), (7, 0), (2, 0)).is_decode
    assert not SequenceLayout((1, 0)).is_decode


def test_last_tokens_index_the_end_of_every_sequence_that_has_one():
    assert SequenceLayout((3, 0, 1, 2)).last_tokens().tolist() == [2, 3, 5]
    for lengths in ((), (0,)):
        last = SequenceLayout(lengths).last_tokens()
        assert last.tolist() == []
        assert last.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 2), (0,)), "2 lengths, 1 contexts, 0 slots"),
        (((1, 2), (0, 0), (5,)), "2 lengths, 2 contexts, 1 slots"),
        (((1, -2),), "cannot be negative"),
        (((1,), (-1,)), "cannot be negative"),
        (((1, 1), (0, 0), (4, 4)), r"two sequences share a slot: \(4, 4\)"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout(*arguments)
