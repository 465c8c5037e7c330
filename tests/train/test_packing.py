"""Packing: what a batch holds, that nothing is lost, and that a cursor restores exactly."""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import UserError
from perilune.train.packing import (
    IGNORED_TARGET,
    DataCursor,
    DroppedDocuments,
    PackedBatch,
    PackedDataset,
    TokenDocuments,
    batches_once,
    epoch_order,
)


def documents_of(lengths: list[int], masks: list[list[bool]] | None = None) -> TokenDocuments:
    """Documents whose tokens are all different: token t of the corpus has id t."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    mask = None if masks is None else np.array([value for part in masks for value in part], np.bool_)
    return TokenDocuments(np.arange(offsets[-1], dtype=np.int32), offsets, None, mask)


def sequences(batch: PackedBatch) -> list[list[int]]:
    return [part.tolist() for part in batch.ids.split(batch.lengths)]


lengths_lists = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda lengths: max(lengths) >= 2)
sizes = st.integers(2, 20)


@given(lengths_lists, sizes, sizes, st.integers(0, 5))
def test_cut_batches_are_full_and_an_epoch_holds_every_token_once_in_document_order(
    lengths: list[int], tokens_per_batch: int, max_length: int, seed: int
) -> None:
    documents = documents_of(lengths)
    data = PackedDataset(documents, tokens_per_batch=tokens_per_batch, max_length=max_length, cut=True, seed=seed)
    stream: list[int] = []
    while len(stream) < 3 * data.num_tokens:
        batch = data.next_batch()
        assert sum(batch.lengths) == len(batch.ids) == len(batch.targets) == tokens_per_batch
        assert all(1 <= length <= max_length for length in batch.lengths)
        for sequence in sequences(batch):
            assert all(b == a + 1 for a, b in pairwise(sequence))  # a stretch of one document, in order
        stream += batch.ids.tolist()
    kept = [token for index, length in enumerate(lengths) if length >= 2 for token in documents.document(index).tolist()]
    assert data.num_tokens == len(kept)
    for epoch in range(3):
        found = stream[epoch * len(kept) : (epoch + 1) * len(kept)]
        order = [index for index in epoch_order(len(lengths), seed, epoch).tolist() if lengths[index] >= 2]
        assert found == [token for index in order for token in documents.document(index).tolist()]
        assert sorted(found) == kept


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(2, 9), st.integers(0, 9), st.integers(0, 5))
def test_whole_documents_are_never_cut_and_an_epoch_holds_each_once(lengths: list[int], max_length: int, more: int, seed: int) -> None:
    documents = documents_of(lengths)
    usable = [index for index, length in enumerate(lengths) if 2 <= length <= max_length]
    build = lambda: PackedDataset(documents, tokens_per_batch=max_length + more, max_length=max_length, cut=False, seed=seed)  # noqa: E731
    if not usable:
        with pytest.raises(UserError, match="No document can be trained on"):
            build()
        return
    data = build()
    assert data.dropped == DroppedDocuments(
        too_long=sum(length > max_length for length in lengths), without_targets=sum(length < 2 for length in lengths)
    )
    seen: list[int] = []
    while len(seen) < 3 * len(usable):
        batch = data.next_batch()
        assert 0 < len(batch.ids) <= max_length + more
        inside = [int(np.searchsorted(documents.offsets, sequence[0], "right")) - 1 for sequence in sequences(batch)]
        assert [documents.document(index).tolist() for index in inside] == sequences(batch)
        assert len(set(inside)) == len(inside)
        seen += inside
    for epoch in range(3):
        assert sorted(seen[epoch * len(usable) : (epoch + 1) * len(usable)]) == usable


@given(lengths_lists, sizes, sizes, st.booleans(), st.integers(0, 30), st.integers(1, 3))
def test_a_restored_cursor_continues_with_the_same_batches(
    lengths: list[int], tokens_per_batch: int, max_length: int, cut: bool, steps: int, world_size: int
) -> None:
    max_length = max_length if cut else max(max_length, 12)
    tokens_per_batch = tokens_per_batch if cut else max(tokens_per_batch, max_length)
    documents = documents_of(lengths)

    def build() -> PackedDataset:
        return PackedDataset(documents, tokens_per_batch=tokens_per_batch, max_length=max_length, cut=cut, seed=3, world_size=world_size)

    data = build()
    for _ in range(steps):
        data.next_batch()
    saved = json.dumps(dataclasses.asdict(data.state()))
    expected = [data.next_batch() for _ in range(4)]
    restored = build()
    restored.restore(DataCursor(**json.loads(saved)))
    for batch in expected:
        again = restored.next_batch()
        assert torch.equal(again.ids, batch.ids) and torch.equal(again.targets, batch.targets) and again.lengths == batch.lengths
    assert restored.state() == data.state()


@given(lengths_lists, sizes, st.booleans(), st.integers(2, 4))
def test_ranks_share_the_stream_of_one_process_and_agree_on_the_cursor(lengths: list[int], size: int, cut: bool, world_size: int) -> None:
    documents = documents_of(lengths)
    size = size if cut else max(size, 12)

    def build(rank: int, world_size: int) -> PackedDataset:
        return PackedDataset(documents, tokens_per_batch=size, max_length=size, cut=cut, seed=1, rank=rank, world_size=world_size)

    alone = build(0, 1)
    ranks = [build(rank, world_size) for rank in range(world_size)]
    for _ in range(5):
        for rank in ranks:
            batch, expected = rank.next_batch(), alone.next_batch()
            assert torch.equal(batch.ids, expected.ids) and batch.lengths == expected.lengths
        assert {rank.state() for rank in ranks} == {alone.state()}


def test_a_run_may_resume_on_another_number_of_ranks_and_with_other_sizes() -> None:
    documents = documents_of([5, 9, 4, 7, 6])
    two = [PackedDataset(documents, tokens_per_batch=4, max_length=4, cut=True, seed=0, rank=rank, world_size=2) for rank in range(2)]
    stream = [token for _ in range(3) for rank in two for token in rank.next_batch().ids.tolist()]
    one = PackedDataset(documents, tokens_per_batch=7, max_length=7, cut=True, seed=0)
    one.restore(two[0].state())
    stream += one.next_batch().ids.tolist()
    assert len(stream) == documents.num_tokens and sorted(stream) == list(range(31))


def test_a_checkpoint_at_an_epochs_end_resumes_with_the_next_epoch() -> None:
    documents = documents_of([4, 4, 4])
    data = PackedDataset(documents, tokens_per_batch=6, max_length=6, cut=True, seed=0)
    data.next_batch()
    data.next_batch()
    assert data.state() == DataCursor(seed=0, epoch=1, position=0, offset=0, fingerprint=documents.fingerprint)
    resumed = PackedDataset(documents, tokens_per_batch=6, max_length=6, cut=True, seed=0)
    resumed.restore(data.state())
    assert len(resumed.next_batch().ids) == 6


def test_a_longer_sequence_limit_after_resuming_neither_repeats_nor_loses_a_conversation() -> None:
    documents = documents_of([3, 9, 3, 9, 3, 9, 3, 3])
    data = PackedDataset(documents, tokens_per_batch=9, max_length=4, cut=False, seed=2)
    first = data.next_batch().ids.tolist()
    resumed = PackedDataset(documents, tokens_per_batch=9, max_length=9, cut=False, seed=2)
    resumed.restore(data.state())
    rest: list[int] = []
    while resumed.state().epoch == 0:
        rest += resumed.next_batch().ids.tolist()
    short = {token for index, length in enumerate([3, 9, 3, 9, 3, 9, 3, 3]) if length == 3 for token in documents.document(index).tolist()}
    seen = [token for token in first + rest if token in short]
    assert sorted(seen[: len(short)]) == sorted(short)  # the last batch already holds tokens of the next epoch


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": 1}, "belongs to other data"),
        ({"seed": 9}, "drawn with seed 9, not 0"),
        ({"position": 3}, "lies outside the data"),
        ({"position": -1}, "lies outside the data"),
        ({"epoch": -1}, "lies outside the data"),
        ({"offset": 4}, "not cut here"),
        ({"offset": -1}, "not cut here"),
    ],
)
def test_a_cursor_that_does_not_fit_is_refused(change: dict[str, int], reason: str) -> None:
    data = PackedDataset(documents_of([4, 4, 4]), tokens_per_batch=4, max_length=4, cut=True, seed=0)
    with pytest.raises(UserError, match=reason):
        data.restore(dataclasses.replace(data.state(), **change))


def test_a_cursor_inside_a_document_does_not_fit_whole_mode() -> None:
    documents = documents_of([4, 4, 4])
    cut = PackedDataset(documents, tokens_per_batch=3, max_length=4, cut=True, seed=0)
    cut.next_batch()
    whole = PackedDataset(documents, tokens_per_batch=4, max_length=4, cut=False, seed=0)
    with pytest.raises(UserError, match="the other mode"):
        whole.restore(cut.state())


def test_targets_are_the_next_tokens_of_the_same_sequence() -> None:
    documents = documents_of([3, 2, 4])
    (first, second) = batches_once(documents, tokens_per_batch=7, max_length=3, cut=True)
    assert first.lengths == (3, 2, 2)
    assert first.ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert first.targets.tolist() == [1, 2, IGNORED_TARGET, 4, IGNORED_TARGET, 6, IGNORED_TARGET]
    assert first.ids.dtype == first.targets.dtype == torch.int64
    assert first.num_targets == 4
    assert second.ids.tolist() == [7, 8] and second.targets.tolist() == [8, IGNORED_TARGET]


def test_a_mask_says_which_tokens_are_targets() -> None:
    documents = documents_of([4, 3], [[True, False, True, True], [False, False, True]])
    (batch,) = batches_once(documents, tokens_per_batch=7, max_length=4, cut=False)
    # Position t predicts token t + 1, so it is the mask of token t + 1 that counts; token 0 is nobody's target.
    assert batch.targets.tolist() == [IGNORED_TARGET, 2, 3, IGNORED_TARGET, IGNORED_TARGET, 6, IGNORED_TARGET]


def test_conversations_without_a_learnable_token_are_dropped_and_counted() -> None:
    documents = documents_of([3, 3, 9, 2], [[True, False, False], [False, True, False], [True] * 9, [False, False]])
    data = PackedDataset(documents, tokens_per_batch=4, max_length=4, cut=False, seed=0)
    assert data.dropped == DroppedDocuments(too_long=1, without_targets=2)
    assert data.next_batch().ids.tolist() == [3, 4, 5]


@given(lengths_lists, sizes, sizes)
def test_evaluation_reads_every_usable_document_once(lengths: list[int], tokens_per_batch: int, max_length: int) -> None:
    documents = documents_of(lengths)
    batches = list(batches_once(documents, tokens_per_batch=tokens_per_batch, max_length=max_length, cut=True))
    assert [len(batch.ids) for batch in batches[:-1]] == [tokens_per_batch] * (len(batches) - 1)
    kept = [token for index, length in enumerate(lengths) if length >= 2 for token in documents.document(index).tolist()]
    assert [token for batch in batches for token in batch.ids.tolist()] == kept


@given(st.integers(0, 200), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_an_epochs_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(count, seed, epoch).tolist()) == list(range(count))


def test_the_order_is_pinned_and_differs_between_epochs_and_seeds() -> None:
    # Pinned: a change of these values would break every checkpoint's data order.
    assert epoch_order(8, 0, 0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert epoch_order(8, 7, 3).tolist() == [2, 7, 6, 1, 0, 3, 4, 5]
    orders = {tuple(epoch_order(20, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_every_place_of_the_order_is_equally_likely_for_a_document() -> None:
    count, epochs = 8, 4000
    places = np.array([np.argsort(epoch_order(count, 5, epoch)) for epoch in range(epochs)])
    for document in range(count):
        histogram = np.bincount(places[:, document], minlength=count)
        assert histogram.min() > 0.8 * epochs / count and histogram.max() < 1.2 * epochs / count


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 1},
        {"tokens_per_batch": 1},
        {"cut": False, "max_length": 9},
        {"rank": 1},
        {"rank": -1},
        {"seed": -1},
    ],
)
def test_sizes_out_of_range_are_refused(options: dict[str, int]) -> None:
    defaults = {"tokens_per_batch": 8, "max_length": 8, "cut": True, "seed": 0}
    with pytest.raises(ValueError):
        PackedDataset(documents_of([4]), **{**defaults, **options})


def test_the_fingerprint_sees_tokens_borders_and_mask() -> None:
    plain = documents_of([2, 4])
    assert plain.fingerprint == documents_of([2, 4]).fingerprint
    others = [documents_of([3, 3]), documents_of([2, 4], [[True] * 2, [True] * 4]), TokenDocuments(plain.tokens + 1, plain.offsets)]
    assert len({document.fingerprint for document in [plain, *others]}) == 4
