"""ModelConfig refuses what contradicts itself, and counts layers from zero."""

import pytest
from pydantic import ValidationError

from perilune.model.hub_config import config_to_json
from tests.model.tiny_models import k3_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": ()}, "attention lists no layer"),
        ({"attention": ("kda", "swa")}, "'kda' or 'mla'"),
        ({"num_experts_per_token": 6}, r"num_experts_per_token \(6\) must be below num_experts \(6\)"),
        ({"first_k_dense": 6}, r"first_k_dense \(6\) exceeds the number of layers \(5\)"),
        ({"situ_beta": None}, "situ_linear_beta without situ_beta"),
        ({"pad_token_id": 32}, "pad_token_id 32 lies outside the vocabulary of 32"),
        ({"window": 4}, "Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_a_configuration_that_contradicts_itself_cannot_be_made(changes, message):
    with pytest.raises(ValidationError, match=message):
        k3_config(**changes)


def test_layer_numbers_are_zero_based_here():
    config = k3_config()
    assert config.kda_layers == (0, 2, 3)
    assert config.mla_layers == (1, 4)
    assert config.moe_layers == (1, 2, 3, 4)
    assert config.num_layers == 5
    linear = config_to_json(config, "float32")["text_config"]["linear_attn_config"]
    assert linear["kda_layers"] == [1, 3, 4]
    assert linear["full_attn_layers"] == [2, 5]
