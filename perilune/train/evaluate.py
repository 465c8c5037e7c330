"""Held-out quality: bits per byte, comparable between tokenizers and models."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from perilune.errors import UserError
from perilune.model.batch import SequenceLayout
from perilune.model.decoder import Decoder
from perilune.train.baselines import bits_per_byte, count_target_bytes, unigram_bits_per_byte
from perilune.train.packing import IGNORED_TARGET, PackedBatch, TokenDocuments, batches_once
from perilune.train.recipe import RunSettings


@dataclass(frozen=True)
class HeldOut:
    """What evaluations read: fixed batches, the bytes their targets spell, and the unigram model's bits per byte on them."""

    batches: tuple[PackedBatch, ...]
    num_bytes: int
    unigram_bits_per_byte: float


def held_out_set(train: TokenDocuments, held_out: TokenDocuments, bytes_per_token: list[int], run: RunSettings, cut: bool) -> HeldOut:
    """The first batches of the held-out documents, about `run.eval_tokens` tokens; `cut` as in training.

    Raises UserError when they hold no text to predict.
    """
    batches: list[PackedBatch] = []
    for batch in batches_once(held_out, tokens_per_batch=run.tokens_per_batch, max_length=run.max_length, cut=cut):
        batches.append(batch)
        if sum(len(b.ids) for b in batches) >= run.eval_tokens:
            break
    targets = np.concatenate([np.empty(0, np.int64), *(b.targets.numpy() for b in batches)])
    num_bytes = count_target_bytes(targets, bytes_per_token)
    if num_bytes == 0:
        raise UserError(
            f"none of the {len(held_out)} held-out documents has text to predict within run.max_length ({run.max_length}) tokens: "
            "raise held_out_fraction or run.max_length"
        )
    seen = train.tokens if train.target_mask is None else train.tokens[train.target_mask]
    return HeldOut(tuple(batches), num_bytes, unigram_bits_per_byte(seen, targets, len(bytes_per_token), num_bytes))


@torch.inference_mode()
def evaluate(model: Decoder, held_out: HeldOut) -> float:
    """Bits per byte of the model on the held-out batches. Routing uses the bias as it stands; nothing is updated."""
    nats = 0.0
    for batch in held_out.batches:
        logits = model(batch.ids, SequenceLayout(batch.lengths))
        nats += F.cross_entropy(logits, batch.targets, ignore_index=IGNORED_TARGET, reduction="sum").item()
    return bits_per_byte(nats, held_out.num_bytes)
