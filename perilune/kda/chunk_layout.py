"""How ragged sequences are cut into chunks: which token sits in which row of which chunk.

Chunks are ordered by their index inside the sequence, and sequences by falling number of chunks, so the chunks that can be
advanced together (index c of every sequence that has one) lie next to each other and belong to the first sequences.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkLayout:
    """A plan for `lengths` sequences in chunks of `chunk` tokens.

    order [sequences]: sequence ids by falling number of chunks. steps: (first chunk, sequences) for each chunk index.
    rows [chunks * chunk]: the token of each row; rows past a sequence's end repeat its last token and are not `valid`.
    valid [chunks, chunk] bool, or None when every row holds a token. place [tokens]: the row of each token.
    """

    chunk: int
    order: Tensor
    steps: tuple[tuple[int, int], ...]
    rows: Tensor
    valid: Tensor | None
    place: Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is cached must serve training too, whoever asks first
def chunk_layout(lengths: tuple[int, ...], chunk: int, device: torch.device) -> ChunkLayout:
    """The layout of sequences of these lengths, laid end to end. Zero lengths are allowed and get no chunk."""
    length = torch.tensor(lengths, dtype=torch.int64)
    start = length.cumsum(0) - length
    counts = (length + chunk - 1) // chunk
    order = torch.argsort(counts, descending=True, stable=True)
    active = [int((counts > c).sum()) for c in range(int(counts.max()) if len(lengths) else 0)]
    steps, chunk_start, chunk_length = [], [], []
    first = 0
    for c, sequences in enumerate(active):
        members = order[:sequences]
        steps.append((first, sequences))
        chunk_start.append(start[members] + c * chunk)
        chunk_length.append((length[members] - c * chunk).clamp(max=chunk))
        first += sequences
    empty = torch.zeros(0, dtype=torch.int64)
    starts = torch.cat(chunk_start) if chunk_start else empty
    sizes = torch.cat(chunk_length) if chunk_length else empty
    offset = torch.arange(chunk)
    valid = offset < sizes.unsqueeze(1)
    rows = starts.unsqueeze(1) + torch.minimum(offset, sizes.unsqueeze(1) - 1)
    place = torch.empty(int(length.sum()), dtype=torch.int64)
    place[rows[valid]] = torch.arange(first * chunk).view(-1, chunk)[valid]
    return ChunkLayout(
        chunk,
        order.to(device),
        tuple(steps),
        rows.flatten().to(device),
        None if bool(valid.all()) else valid.to(device),
        place.to(device),
    )
