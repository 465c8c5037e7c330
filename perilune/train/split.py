"""Training and held-out parts: which side an item is on depends on its text alone, never on order, name or the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from perilune.errors import UserError

Item = TypeVar("Item")


def text_hash(text: str, purpose: bytes) -> int:
    """A 64-bit hash that is the same on every machine; independent for different purposes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=purpose).digest(), "little")


def split_by_hash(items: Sequence[Item], hashes: Sequence[int], held_out_fraction: float, first_name: str) -> tuple[list[Item], list[Item]]:
    """(train, held out): items whose 64-bit hash falls below the fraction are held out.

    One exception keeps small sets usable: if a side would stay empty, the item with the lowest (held out) or highest (train) hash
    fills it. Raises UserError if there is only one item, be it several times, and a part is to be held out.
    """
    if held_out_fraction == 0.0:
        return list(items), []
    if min(hashes) == max(hashes):
        raise UserError(
            f"There is a single document ({first_name}), so none can be held out to measure the model on: add more, or cut it into "
            "several (of a corpus, by a lower `piece_characters`)."
        )
    threshold = max(held_out_fraction * 2.0**64, min(hashes) + 1)
    threshold = min(threshold, max(hashes))
    pairs = list(zip(items, hashes, strict=True))
    return [item for item, value in pairs if value >= threshold], [item for item, value in pairs if value < threshold]
