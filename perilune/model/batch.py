"""SequenceLayout: the one form of a batch, in training, prefill and decode alike.

A batch is a flat list of tokens, sequence after sequence, without padding, and a layout that says where each sequence ends,
how many of its tokens came in earlier batches, and where its state is kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """`lengths`: new tokens of each sequence (zero allowed). `contexts`: tokens each sequence has behind it, held in a state.
    `slots`: row of each sequence in the state; () when there is no state, as in training."""

    lengths: tuple[int, ...]
    contexts: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.contexts:
            object.__setattr__(self, "contexts", (0,) * len(self.lengths))
        if len(self.contexts) != len(self.lengths) or (self.slots and len(self.slots) != len(self.lengths)):
            raise ValueError(
                f"a layout needs one context and one slot per sequence: {len(self.lengths)} lengths, "
                f"{len(self.contexts)} contexts, {len(self.slots)} slots"
            )
        if any(n < 0 for n in self.lengths) or any(n < 0 for n in self.contexts):
            raise ValueError("lengths and contexts count tokens and cannot be negative")
        if len(set(self.slots)) != len(self.slots):
            raise ValueError(f"two sequences share a slot: {self.slots}")

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence brings exactly one token."""
        return all(n == 1 for n in self.lengths)

    def last_tokens(self) -> Tensor:
        """Index of each non-empty sequence's last token in the flat batch, int64."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return (lengths.cumsum(0) - 1)[lengths > 0]


@dataclass(frozen=True)
class Bucket:
    """Sequences that attention computes together, padded to `queries` new tokens and `keys` tokens in all."""

    members: tuple[int, ...]
    queries: int
    keys: int


# Padded (query, key) pairs that cost about as much as one more round of kernel calls.
_FREE_PADDING = 16384


def attention_buckets(layout: SequenceLayout) -> tuple[Bucket, ...]:
    """Non-empty sequences in buckets of similar size: padding stays within a quarter of the work, or is too small to matter."""
    sizes = [(n, c + n, i) for i, (n, c) in enumerate(zip(layout.lengths, layout.contexts, strict=True)) if n]
    sizes.sort(reverse=True)
    buckets: list[Bucket] = []
    members: list[int] = []
    queries = keys = work = 0
    for n, total, i in sizes:
        padded = (len(members) + 1) * max(queries, n) * max(keys, total)
        if members and padded > 1.25 * (work + n * total) + _FREE_PADDING:
            buckets.append(Bucket(tuple(members), queries, keys))
            members, queries, keys, work = [], 0, 0, 0
        members.append(i)
        queries, keys, work = max(queries, n), max(keys, total), work + n * total
    if members:
        buckets.append(Bucket(tuple(members), queries, keys))
    return tuple(buckets)
