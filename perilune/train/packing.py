"""Packing: documents to batches of flat tokens, without padding, with a cursor that is a handful of integers.

Training reads an endless stream: the documents of epoch 0 in an order drawn from (seed, 0), then those of epoch 1, and so on.
A batch is the next stretch of that stream. In cut mode (pre-training) a stretch has exactly `tokens_per_batch` tokens, and a document
may be cut where it exceeds `max_length` or where the batch ends; its rest opens the next sequence. In whole mode (conversations)
a stretch is as many whole documents as fit. An epoch's last tokens share a batch with the next epoch's first, so no batch is
ever nearly empty, and a checkpoint at an epoch's end resumes with a full batch like any other.

Ranks: step s of a job with w ranks consumes batches s*w ... s*w + w - 1 of the stream, one each. Every rank follows the whole cursor and
builds only its own batch; hence all ranks hold the same state, take the same number of steps, and a run may resume on another number
of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.errors import UserError

IGNORED_TARGET = -100
"""Target of a position that takes no part in the loss (torch's cross_entropy ignores it by default)."""


@dataclass(frozen=True)
class TokenDocuments:
    """Token ids of many documents, back to back.

    tokens       [tokens] int32, possibly memory-mapped and read-only
    offsets      [documents + 1] int64: document i is tokens[offsets[i]:offsets[i + 1]]
    byte_lengths [documents] int64, UTF-8 bytes of each text; None where tokens do not come from one text (chat)
    target_mask  [tokens] bool, True where a token is one the model should learn to predict; None means everywhere
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    byte_lengths: NDArray[np.int64] | None = None
    target_mask: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all texts. Raises ValueError for documents that do not come from texts."""
        if self.byte_lengths is None:
            raise ValueError("these documents have no byte lengths")
        return int(self.byte_lengths.sum())

    def document(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @cached_property
    def fingerprint(self) -> int:
        """Checksum of tokens, borders and mask, for noticing that a cursor belongs to other data."""
        checksum = zlib.crc32(buffer(self.tokens))
        checksum = zlib.crc32(buffer(self.offsets), checksum)
        if self.target_mask is not None:
            checksum = zlib.crc32(buffer(self.target_mask), checksum)
        return checksum

    @classmethod
    def from_sequences(cls, sequences: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> TokenDocuments:
        """Join (ids, target mask) pairs, such as rendered conversations. Raises ValueError if a mask's length differs from its ids'."""
        ids: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        masks: list[NDArray[np.bool_]] = [np.empty(0, np.bool_)]
        for number, (sequence, mask) in enumerate(sequences):
            if len(sequence) != len(mask):
                raise ValueError(f"sequence {number} has {len(sequence)} ids and a target mask of {len(mask)}")
            ids.append(as_token_ids(sequence))
            masks.append(np.asarray(mask, np.bool_))
        offsets = np.cumsum([len(part) for part in ids], dtype=np.int64)
        return cls(np.concatenate(ids), offsets, None, np.concatenate(masks))


def as_token_ids(ids: Sequence[int]) -> NDArray[np.int32]:
    """Token ids as int32. Raises ValueError for ids that do not fit."""
    wide = np.asarray(ids, np.int64)
    if wide.size and not 0 <= int(wide.min()) <= int(wide.max()) <= np.iinfo(np.int32).max:
        raise ValueError(f"token ids must lie in [0, 2^31), got {wide.min()} to {wide.max()}")
    return wide.astype(np.int32)


def buffer(array: NDArray[Any]) -> memoryview:
    """The array's bytes, for checksums and files."""
    contiguous: Any = np.ascontiguousarray(array)  # numpy's types know no buffer protocol before Python 3.12
    return memoryview(contiguous)


@dataclass(frozen=True)
class PackedBatch:
    """Sequences back to back.

    ids     [tokens] int64
    targets [tokens] int64: the next token of the same sequence, or IGNORED_TARGET where there is none or it is not to be learned
    lengths length of each sequence; they add up to tokens
    """

    ids: torch.Tensor
    targets: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def num_targets(self) -> int:
        """Positions that take part in the loss. May be 0: sum it over ranks and micro-batches before dividing by it."""
        return int((self.targets != IGNORED_TARGET).sum())


@dataclass(frozen=True)
class DataCursor:
    """Where the stream stands: plain integers, ready for JSON (`dataclasses.asdict`, `DataCursor(**loaded)`).

    seed, epoch    draw the order of the documents
    position       place of the next document in that order (of all documents, also those that are dropped)
    offset         tokens of that document that are already used (cut mode)
    fingerprint    checksum of the data the cursor belongs to
    """

    seed: int
    epoch: int
    position: int
    offset: int
    fingerprint: int


@dataclass(frozen=True)
class DroppedDocuments:
    """Documents that never enter a batch: too long to stay whole, or without any target to learn."""

    too_long: int
    without_targets: int


@dataclass(frozen=True)
class _Place:
    """A place in one epoch's order; `position == number of documents` is its end."""

    position: int
    offset: int


class PackedDataset:
    """The endless stream of batches described at the top of this file.

    documents        what to read; with a target mask for conversations
    tokens_per_batch exactly this many tokens in cut mode, at most in whole mode
    max_length       longest sequence; in whole mode longer documents are dropped and counted in `dropped`
    cut              True: cut mode, False: whole mode
    seed             draws the order of each epoch

    Raises ValueError for numbers out of range, UserError when no document is left to train on.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        *,
        tokens_per_batch: int,
        max_length: int,
        cut: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _check_sizes(tokens_per_batch, max_length, cut)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in [0, world_size), got {rank} of {world_size}")
        if not 0 <= seed < 1 << 63:
            raise ValueError(f"seed must lie in [0, 2^63), got {seed}")
        self.documents = documents
        self.tokens_per_batch = tokens_per_batch
        self.max_length = max_length
        self.cut = cut
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._usable, self.dropped = _usable_documents(documents, max_length, cut)
        if not self._usable.any():
            raise UserError(
                f"No document can be trained on: {self.dropped.too_long} are longer than {max_length} tokens and "
                f"{self.dropped.without_targets} have no target: add data or raise the sequence length."
            )
        self._enter_epoch(0)
        self._place = _Place(0, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        lengths = np.diff(self.documents.offsets)
        return int(lengths[self._usable].sum())

    def next_batch(self) -> PackedBatch:
        """This rank's batch of the next step. Never ends."""
        mine: list[tuple[int, int]] = []
        for rank in range(self.world_size):
            spans = self._next_spans()
            if rank == self.rank:
                mine = spans
        return _build(self.documents, mine)

    def state(self) -> DataCursor:
        """The cursor before the next step; the same on every rank."""
        position = int(self._positions[self._place.position])
        return DataCursor(self.seed, self._epoch, position, self._place.offset, self.documents.fingerprint)

    def restore(self, cursor: DataCursor) -> None:
        """Continue exactly where `cursor` was taken. Batch size, sequence length and ranks may differ from then.

        Raises UserError when the cursor was taken on other data, with another seed, or does not fit this mode.
        """
        if cursor.fingerprint != self.documents.fingerprint:
            raise UserError(
                "The checkpoint's data cursor belongs to other data: restore the corpus and tokenizer it was made with, or start anew."
            )
        if cursor.seed != self.seed:
            raise UserError(
                f"The checkpoint's data order was drawn with seed {cursor.seed}, not {self.seed}: set that seed, or start a new run."
            )
        if cursor.epoch < 0 or not 0 <= cursor.position < len(self.documents):
            raise UserError(f"The checkpoint's data cursor {cursor} lies outside the data: the checkpoint is damaged, use an earlier one.")
        self._enter_epoch(cursor.epoch)
        position = int(np.searchsorted(self._positions, cursor.position))
        if position == len(self._order):  # the rest of the epoch is dropped under today's sequence length
            self._enter_epoch(cursor.epoch + 1)
            position = 0
        if cursor.offset:
            document = self._order[position]
            length = int(self.documents.offsets[document + 1] - self.documents.offsets[document])
            if not self.cut or self._positions[position] != cursor.position or not 0 < cursor.offset < length:
                raise UserError(
                    f"The checkpoint's data cursor {cursor} points into a document that is not cut here: it was taken in the other mode."
                )
        self._place = _Place(position, cursor.offset)

    def _enter_epoch(self, epoch: int) -> None:
        """Draw the order over all documents and then leave out the unusable, so that it does not depend on the sequence length."""
        everything = epoch_order(len(self.documents), self.seed, epoch)
        self._epoch = epoch
        self._positions = np.flatnonzero(self._usable[everything])
        self._order = everything[self._positions]

    def _next_spans(self) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        room = self.tokens_per_batch
        whole: set[int] = set()  # a batch holds no conversation twice, however small the data
        while True:
            more, self._place = _fill(self.documents, self._order, self._place, room, self.max_length, self.cut, whole)
            spans += more
            room -= sum(end - start for start, end in more)
            if self._place.position < len(self._order):
                return spans
            # Entered at once, not at the next call: a state taken here already points at the next epoch's first document.
            self._enter_epoch(self._epoch + 1)
            self._place = _Place(0, 0)
            if not room:
                return spans


def batches_once(documents: TokenDocuments, *, tokens_per_batch: int, max_length: int, cut: bool) -> Iterator[PackedBatch]:
    """Every usable document once, in order, for evaluation. The last batch may be smaller. Raises ValueError for sizes out of range."""
    _check_sizes(tokens_per_batch, max_length, cut)
    usable, _ = _usable_documents(documents, max_length, cut)
    order = np.flatnonzero(usable).astype(np.int64)
    place = _Place(0, 0)
    while place.position < len(order):
        spans, place = _fill(documents, order, place, tokens_per_batch, max_length, cut, set())
        yield _build(documents, spans)


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of range(count) drawn from (seed, epoch).

    Sorts by SplitMix64 (Steele, Lea, Flood 2014) of seed, epoch and index rather than asking numpy's generator, whose streams may
    change between releases: a resumed run must find the order it had.
    """
    start = _splitmix64(_splitmix64(np.array([seed], np.uint64)) ^ np.array([epoch], np.uint64))
    indices: NDArray[np.uint64] = np.arange(count).astype(np.uint64)
    keys = _splitmix64(start + indices)
    return np.argsort(keys, kind="stable").astype(np.int64)


def _splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _check_sizes(tokens_per_batch: int, max_length: int, cut: bool) -> None:
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2 (a token and its target), got {max_length}")
    if tokens_per_batch < 2:
        raise ValueError(f"tokens_per_batch must be at least 2 (a token and its target), got {tokens_per_batch}")
    if not cut and max_length > tokens_per_batch:
        raise ValueError(f"whole documents of up to {max_length} tokens do not fit in batches of {tokens_per_batch}")


def _usable_documents(documents: TokenDocuments, max_length: int, cut: bool) -> tuple[NDArray[np.bool_], DroppedDocuments]:
    """Which documents can enter a batch, [documents] bool, and why the others cannot."""
    lengths = np.diff(documents.offsets)
    if documents.target_mask is None:
        learnable = lengths >= 2
    else:
        # The first token of a document is nobody's target.
        counts = np.concatenate([[0], np.cumsum(documents.target_mask, dtype=np.int64)])
        first = np.minimum(documents.offsets[:-1] + 1, documents.offsets[1:])
        learnable = counts[documents.offsets[1:]] > counts[first]
    fits = np.ones_like(learnable) if cut else lengths <= max_length
    dropped = DroppedDocuments(too_long=int((~fits).sum()), without_targets=int((fits & ~learnable).sum()))
    return fits & learnable, dropped


def _fill(
    documents: TokenDocuments, order: NDArray[np.int64], place: _Place, room: int, max_length: int, cut: bool, whole: set[int]
) -> tuple[list[tuple[int, int]], _Place]:
    """Spans of the flat token array for at most `room` tokens from `place` on, and the place after them, at most the end of `order`.

    In whole mode stops before a document that does not fit or is in `whole`, and adds what it takes to `whole`.
    """
    spans: list[tuple[int, int]] = []
    position, offset = place.position, place.offset
    while room and position < len(order):
        document = int(order[position])
        start = int(documents.offsets[document]) + offset
        rest = int(documents.offsets[document + 1]) - start
        if not cut and (rest > room or document in whole):
            break
        taken = min(rest, room, max_length)
        spans.append((start, start + taken))
        room -= taken
        whole.add(document)
        position, offset = (position + 1, 0) if taken == rest else (position, offset + taken)
    return spans, _Place(position, offset)


def _build(documents: TokenDocuments, spans: list[tuple[int, int]]) -> PackedBatch:
    ids = np.concatenate([documents.tokens[start:end] for start, end in spans]).astype(np.int64)
    lengths = [end - start for start, end in spans]
    targets = np.full_like(ids, IGNORED_TARGET)
    targets[:-1] = ids[1:]
    if documents.target_mask is not None:
        mask = np.concatenate([documents.target_mask[start:end] for start, end in spans])
        targets[:-1][~mask[1:]] = IGNORED_TARGET
    targets[np.cumsum(lengths) - 1] = IGNORED_TARGET
    return PackedBatch(torch.from_numpy(ids), torch.from_numpy(targets), tuple(lengths))
