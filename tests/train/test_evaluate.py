"""Held-out quality."""

import math

import numpy as np
import pytest
import torch

from perilune.errors import UserError
from perilune.model.batch import SequenceLayout
from perilune.model.decoder import Decoder
from perilune.train.evaluate import evaluate, held_out_set
from perilune.train.packing import TokenDocuments
from perilune.train.recipe import RunSettings
from tests.model.tiny_models import k3_config, random_model

CONFIG = k3_config(attention=("kda", "mla"))
TRAIN = [[0, 1, 1, 2], [1, 1]]
HELD_OUT = [[1, 2, 3, 31], [2, 2, 31], [4, 31]]
BYTES = [1, 1, 2, 3, *[1] * 27, 0]  # id 31 is special: it ends a document and spells nothing


def texts(ids: list[list[int]], masks: list[list[bool]] | None = None) -> TokenDocuments:
    offsets = np.cumsum([0] + [len(document) for document in ids], dtype=np.int64)
    mask = None if masks is None else np.array([flag for document in masks for flag in document], np.bool_)
    return TokenDocuments(np.array([token for document in ids for token in document], np.int32), offsets, None, mask)


def settings(**run: int) -> RunSettings:
    return RunSettings.model_validate({"steps": 1, "tokens_per_batch": 16, "max_length": 8, "eval_tokens": 100, **run})


@pytest.fixture
def model() -> Decoder:
    return random_model(CONFIG, torch.float32)


def nats(model: Decoder, document: list[int]) -> list[float]:
    """Negative log-likelihood of each token of a document but the first."""
    with torch.no_grad():
        log_probabilities = model(torch.tensor(document), SequenceLayout((len(document),))).double().log_softmax(-1)
    return [-log_probabilities[place, token].item() for place, token in enumerate(document[1:])]


def test_bits_per_byte_are_those_of_the_predicted_tokens(model: Decoder) -> None:
    held_out = held_out_set(texts(TRAIN), texts(HELD_OUT), BYTES, settings(), cut=True)
    # Predicted: 2 3 end, 2 end, end. They spell 2 + 3, 2 and 0 bytes.
    assert held_out.num_bytes == 7
    expected = sum(sum(nats(model, document)) for document in HELD_OUT) / math.log(2) / 7
    assert evaluate(model, held_out) == pytest.approx(expected, rel=1e-5)


def test_the_unigram_figure_counts_the_training_tokens_and_scores_the_same_targets() -> None:
    held_out = held_out_set(texts(TRAIN), texts(HELD_OUT), BYTES, settings(), cut=True)
    # Counts of the 6 training tokens plus one for each of 32: id 2 has 2 of 38; ids 3 and 31 have 1 of 38.
    expected = -(2 * math.log2(2 / 38) + 4 * math.log2(1 / 38)) / 7
    assert held_out.unigram_bits_per_byte == pytest.approx(expected, rel=1e-9)


def test_of_conversations_only_the_targets_count(model: Decoder) -> None:
    train = texts(TRAIN, [[False, True, True, False], [False, True]])
    masks = [[False, False, True, True], [False, True, False], [False, False]]
    held_out = held_out_set(train, texts(HELD_OUT, masks), BYTES, settings(tokens_per_batch=8), cut=False)
    # Targets: 3 end of the first, 2 of the second; the third has none. Of the training tokens three are targets, all id 1.
    assert held_out.num_bytes == 3 + 0 + 2
    expected = (nats(model, HELD_OUT[0])[1] + nats(model, HELD_OUT[0])[2] + nats(model, HELD_OUT[1])[0]) / math.log(2) / 5
    assert evaluate(model, held_out) == pytest.approx(expected, rel=1e-5)
    assert held_out.unigram_bits_per_byte == pytest.approx(-3 * math.log2(1 / 35) / 5, rel=1e-9)


def test_the_held_out_batches_are_fixed(model: Decoder) -> None:
    many = texts([[n % 31, (3 * n) % 31, 31] for n in range(40)])
    first, second = (held_out_set(texts(TRAIN), many, BYTES, settings(eval_tokens=40), cut=True) for _ in range(2))
    assert [batch.ids.tolist() for batch in first.batches] == [batch.ids.tolist() for batch in second.batches]
    assert evaluate(model, first) == evaluate(model, first) == evaluate(model, second)
    assert not model.training or all(parameter.grad is None for parameter in model.parameters())


def test_about_as_many_tokens_as_asked_for_are_read_from_the_beginning() -> None:
    many = texts([[n % 31, (3 * n) % 31, 31] for n in range(40)])
    held_out = held_out_set(texts(TRAIN), many, BYTES, settings(eval_tokens=40), cut=True)
    ids = torch.cat([batch.ids for batch in held_out.batches]).tolist()
    assert len(ids) == 48  # whole batches of 16
    assert ids == many.tokens[:48].tolist()


def test_an_evaluation_changes_nothing_and_does_not_spoil_the_next_step(model: Decoder) -> None:
    held_out = held_out_set(texts(TRAIN), texts(HELD_OUT), BYTES, settings(), cut=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graphs: list[bool] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    evaluate(model, held_out)
    hook.remove()
    assert graphs == [False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    batch = held_out.batches[0]
    model(batch.ids, SequenceLayout(batch.lengths)).sum().backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize(
    ("held_out", "masks", "cut"),
    [
        ([], None, True),
        ([[1, 2, 3] * 4], [[True] * 12], False),  # longer than max_length, and never cut
        ([[1, 31], [2, 31]], None, True),  # nothing but the ends of documents to predict
    ],
    ids=["nothing held out", "all too long", "no text"],
)
def test_a_held_out_part_without_text_to_predict_is_refused(held_out: list[list[int]], masks: list[list[bool]] | None, cut: bool) -> None:
    with pytest.raises(UserError, match=r"raise held_out_fraction or run\.max_length"):
        held_out_set(texts(TRAIN), texts(held_out, masks), BYTES, settings(), cut=cut)
