"""Bits per byte, and the unigram model every language model has to beat.

Bits per byte compare models with different tokenizers: the negative log-likelihood of a text in bits, over its UTF-8 bytes.
The likelihood and the bytes must cover the same tokens. A packed evaluation does not predict the first token of a sequence, so
count the bytes of the predicted ones with `count_target_bytes`, and give the baseline the same targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def bits_per_byte(negative_log_likelihood: float, byte_count: int) -> float:
    """Summed negative log-likelihood in nats over bytes, in bits. Raises ValueError when there is no byte."""
    if byte_count < 1:
        raise ValueError(f"bits per byte need at least one byte, got {byte_count}")
    return negative_log_likelihood / (math.log(2.0) * byte_count)


def count_target_bytes(targets: NDArray[np.integer], bytes_per_token: Sequence[int] | NDArray[np.integer]) -> int:
    """Bytes spelled by `targets` (any shape; negative entries, the ignored targets, count nothing).

    bytes_per_token [vocabulary]: UTF-8 bytes of each token, 0 for special tokens.
    """
    flat = np.asarray(targets).reshape(-1)
    return int(np.asarray(bytes_per_token, np.int64)[flat[flat >= 0]].sum())


@dataclass(frozen=True)
class UnigramModel:
    """Token frequencies of the training text with add-one smoothing, so that no token has probability 0.

    log_probabilities [vocabulary] float64, nats
    """

    log_probabilities: NDArray[np.float64]

    @classmethod
    def fit(cls, tokens: NDArray[np.integer], vocab_size: int) -> UnigramModel:
        """Count `tokens` (any shape; negative entries are ignored). Raises ValueError for an id outside the vocabulary."""
        flat = np.asarray(tokens).reshape(-1)
        flat = flat[flat >= 0]
        if flat.size and int(flat.max()) >= vocab_size:
            raise ValueError(f"token id {flat.max()} does not fit a vocabulary of {vocab_size}")
        counts = np.bincount(flat, minlength=vocab_size).astype(np.float64) + 1.0
        return cls(np.log(counts) - math.log(counts.sum()))

    def negative_log_likelihood(self, targets: NDArray[np.integer]) -> float:
        """Sum over `targets` (any shape; negative entries count nothing), nats."""
        flat = np.asarray(targets).reshape(-1)
        return float(-self.log_probabilities[flat[flat >= 0]].sum())


def unigram_bits_per_byte(
    train_tokens: NDArray[np.integer], held_out_targets: NDArray[np.integer], vocab_size: int, held_out_bytes: int
) -> float:
    """Bits per byte of the unigram model fitted on `train_tokens`, over `held_out_targets` that spell `held_out_bytes` bytes."""
    return bits_per_byte(UnigramModel.fit(train_tokens, vocab_size).negative_log_likelihood(held_out_targets), held_out_bytes)
