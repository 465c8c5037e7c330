"""Hub directories: names, shapes and values survive, what the releases pack is unpacked, and damage is named in one sentence."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from perilune.errors import UserError
from perilune.model import hub
from perilune.model.batch import SequenceLayout
from perilune.model.decoder import Decoder
from perilune.model.hub import load_model, placements, save_model
from perilune.model.hub_config import read_config
from perilune.moe.mxfp4 import decode_mxfp4, encode_mxfp4
from tests.model.tiny_models import cast, k3_config, kimi_linear_config, random_ids, random_model

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIGS = {"k3": k3_config(), "kimi-linear": kimi_linear_config()}
each_family = pytest.mark.parametrize("family", CONFIGS)
each_golden = pytest.mark.parametrize("name", ["k3-tiny", "kimi-linear-tiny"])
A_LOG = "language_model.model.layers.0.self_attn.A_log"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3"


def saved(directory: Path, family: str = "k3", **changes: object) -> Decoder:
    """A random model of the family, written to the directory."""
    model = random_model(CONFIGS[family].model_copy(update=changes), torch.float32)
    save_model(model, directory)
    return model


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of model.safetensors."""
    file = directory / "model.safetensors"
    tensors = {k: v for k, v in (load_file(file) | changes).items() if v is not None}
    save_file(tensors, file)


def shard(directory: Path, parts: int = 3) -> dict[str, str]:
    """Split model.safetensors into shards with an index, as the Hub has it; returns the index's map."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    where = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({k: tensors[k] for k in tensors if where[k] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def assert_same(a: Decoder, b: Decoder) -> None:
    assert a.config == b.config
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, tensor in a.state_dict().items():
        assert tensor.dtype == b.state_dict()[name].dtype, name
        assert torch.equal(tensor, b.state_dict()[name]), name


def refused(directory: Path, *needles: str) -> None:
    """Loading fails with one sentence that names the directory or tensor and every needle."""
    with pytest.raises(UserError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message or ": give" in message, "the message says what to do"
    for needle in needles:
        assert needle in message, message


@each_golden
def test_our_names_and_shapes_are_exactly_those_of_the_golden_files(name):
    model = Decoder(read_config(GOLDEN / name))
    ours = {p.hub: p.shape for p in placements(model)}
    with safe_open(GOLDEN / name / "model.safetensors", "pt") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert set(ours) == set(stored)
    differing = {key for key in ours if ours[key] != stored[key]}
    assert all(key.endswith("A_log") for key in differing)
    assert len(differing) == len(model.config.kda_layers)


@each_golden
def test_a_golden_model_saved_again_has_the_same_tensors_under_the_same_names(name, tmp_path):
    model = load_model(GOLDEN / name)
    save_model(model, tmp_path)
    before, after = load_file(GOLDEN / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].shape == tensor.shape, key
        assert torch.equal(after[key], tensor), key
    assert_same(model, load_model(tmp_path))


@each_golden
def test_every_stored_tensor_reaches_the_network(name):
    model = load_model(GOLDEN / name)
    stored = load_file(GOLDEN / name / "model.safetensors")
    count = sum(t[:3].numel() if key.endswith("A_log") and t.shape == (128,) else t.numel() for key, t in stored.items())
    assert sum(t.numel() for t in model.state_dict().values()) == count
    moe = model.layers[1].mlp
    prefix = ("language_model." if name == "k3-tiny" else "") + "model.layers.1.block_sparse_moe."
    width = model.config.moe_intermediate_size
    for e in (0, 5):
        assert torch.equal(moe.experts_gate_up[e, :width], stored[f"{prefix}experts.{e}.w1.weight"])
        assert torch.equal(moe.experts_gate_up[e, width:], stored[f"{prefix}experts.{e}.w3.weight"])
        assert torch.equal(moe.experts_down[e], stored[f"{prefix}experts.{e}.w2.weight"])
    assert torch.equal(moe.selection_bias, stored[f"{prefix}gate.e_score_correction_bias"])
    conv = stored[prefix.replace("layers.1.block_sparse_moe", "layers.0.self_attn") + "k_conv1d.weight"]
    assert torch.equal(model.layers[0].self_attn.k_conv, conv[:, 0])


@each_family
def test_saving_and_loading_is_the_identity_bit_for_bit(family, tmp_path):
    model = saved(tmp_path, family)
    assert_same(model, load_model(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    save_model(model, tmp_path)
    assert_same(model, load_model(tmp_path))


@each_family
def test_more_heads_than_the_padding_and_other_combinations_of_parts_survive(family, tmp_path):
    changes = {"kda_num_heads": 130, "kda_head_dim": 2, "num_shared_experts": 0, "first_k_dense": 2, "mla_output_gate": False}
    assert_same(saved(tmp_path, family, **changes), load_model(tmp_path))


def test_a_model_with_exactly_as_many_heads_as_the_padding_survives(tmp_path):
    assert_same(saved(tmp_path, kda_num_heads=128, kda_head_dim=2), load_model(tmp_path))


@each_family
def test_loading_in_another_dtype_casts_all_but_the_selection_bias(family, tmp_path):
    model = saved(tmp_path, family)
    for dtype in (torch.bfloat16, torch.float64):
        assert_same(load_model(tmp_path, dtype), cast(random_model(CONFIGS[family], torch.float32), dtype))
    assert model.layers[1].mlp.selection_bias.dtype == torch.float32


@each_family
def test_bf16_saving_keeps_fp32_where_the_releases_do(family, tmp_path):
    model = random_model(CONFIGS[family], torch.float32)
    save_model(model, tmp_path, torch.bfloat16)
    wide_endings = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    stored = load_file(tmp_path / "model.safetensors")
    for key, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if key.endswith(wide_endings) else torch.bfloat16), key
    for ending in wide_endings:
        assert any(key.endswith(ending) for key in stored)
    loaded = load_model(tmp_path)
    for ours in ("A_log", "dt_bias", "q_conv", "o_norm.weight"):
        assert torch.equal(loaded.state_dict()[f"layers.0.self_attn.{ours}"], model.state_dict()[f"layers.0.self_attn.{ours}"])
    assert torch.equal(loaded.layers[1].mlp.selection_bias, model.layers[1].mlp.selection_bias)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16().float())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_loaded_parameters_train_but_layer_0s_unused_read(tmp_path):
    saved(tmp_path)
    frozen = {name for name, p in load_model(tmp_path).named_parameters() if not p.requires_grad}
    assert frozen == {"layers.0.self_attention_res.norm.weight", "layers.0.self_attention_res.proj"}


@each_family
def test_a_sharded_directory_with_its_index_loads(family, tmp_path):
    model = saved(tmp_path, family)
    where = shard(tmp_path)
    assert len(set(where.values())) == 3
    assert_same(model, load_model(tmp_path))


def test_shards_without_an_index_load_too(tmp_path):
    model = saved(tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same(model, load_model(tmp_path))


def test_packed_experts_are_decoded_on_load(tmp_path):
    model = saved(tmp_path, routed_latent_size=32, moe_intermediate_size=64)
    expected = random_model(model.config, torch.float32)
    moe = expected.layers[2].mlp
    changes: dict[str, torch.Tensor | None] = {}
    parts = {"w1": moe.experts_gate_up[:, :64], "w3": moe.experts_gate_up[:, 64:], "w2": moe.experts_down}
    for matrix, stack in parts.items():
        for e in range(6):
            key = f"language_model.model.layers.2.block_sparse_moe.experts.{e}.{matrix}.weight"
            packed, scale = encode_mxfp4(stack[e].detach())
            changes |= {key: None, f"{key}_packed": packed, f"{key}_scale": scale}
            with torch.no_grad():
                stack[e].copy_(decode_mxfp4(packed, scale))
    rewrite(tmp_path, **changes)
    loaded = load_model(tmp_path)
    assert not torch.equal(loaded.layers[2].mlp.experts_down, model.layers[2].mlp.experts_down)
    assert_same(loaded, expected)
    ids, layout = random_ids(9), SequenceLayout((9,))
    assert torch.equal(loaded(ids, layout), expected(ids, layout))


def test_vision_tensors_are_left_aside(tmp_path, caplog):
    model = saved(tmp_path)
    rewrite(tmp_path, **{"vision_tower.blocks.0.weight": torch.zeros(3), "mm_projector.proj.weight": torch.zeros(2, 2)})
    with caplog.at_level("INFO", logger="perilune.model.hub"):
        assert_same(model, load_model(tmp_path))
    assert "vision tower is left aside" in caplog.text


def test_missing_tensors_are_named(tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, **{f"{EXPERT}.w2.weight": None})
    refused(tmp_path, f"lacks {EXPERT}.w2.weight;", str(tmp_path))
    rewrite(tmp_path, **{f"language_model.model.layers.0.self_attn.{n}_proj.weight": None for n in "qkvo"})
    refused(tmp_path, "lacks ", "self_attn.q_proj.weight", "and 2 more")


def test_misshapen_tensors_are_named_with_both_shapes(tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, **{"language_model.lm_head.weight": torch.zeros(31, 16)})
    refused(tmp_path, "language_model.lm_head.weight is [31, 16] instead of [32, 16]")


@pytest.mark.parametrize(("suffix", "shape"), [("packed", (64, 15)), ("scale", (64, 2))])
def test_misshapen_packed_tensors_are_named_with_both_shapes(tmp_path, suffix, shape):
    saved(tmp_path, routed_latent_size=32, moe_intermediate_size=64)
    packed, scale = encode_mxfp4(torch.randn(64, 32))
    key = f"{EXPERT}.w1.weight"
    wrong = {f"{key}_packed": packed, f"{key}_scale": scale, key: None, f"{key}_{suffix}": torch.zeros(shape, dtype=torch.uint8)}
    rewrite(tmp_path, **wrong)
    right = [64, 16] if suffix == "packed" else [64, 1]
    refused(tmp_path, f"{key}_{suffix} is {list(shape)} instead of {right}")


def test_packed_tensors_without_their_scales_are_missing(tmp_path):
    saved(tmp_path, routed_latent_size=32, moe_intermediate_size=64)
    key = f"{EXPERT}.w1.weight"
    rewrite(tmp_path, **{key: None, f"{key}_packed": encode_mxfp4(torch.randn(64, 32))[0]})
    refused(tmp_path, f"lacks {key}")


def test_unexpected_tensors_are_named(tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, **{"language_model.model.layers.5.input_layernorm.weight": torch.ones(16), "extra": torch.ones(1)})
    refused(tmp_path, "does not explain: extra, language_model.model.layers.5.input_layernorm.weight")


@pytest.mark.parametrize("bytes_left", [0, 4, 200, -1])
def test_a_truncated_file_is_named(tmp_path, bytes_left):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:bytes_left])
    refused(tmp_path, str(file), "truncated or damaged", "copy it again")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', b"\xff\xff"],
    ids=str,
)
def test_a_damaged_index_is_named(tmp_path, content):
    saved(tmp_path)
    shard(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(tmp_path, f"{index} is damaged", "copy it again")


def test_a_missing_shard_is_named(tmp_path):
    saved(tmp_path)
    shard(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors is missing but named by the index", "copy it")


def test_a_shard_that_lacks_what_the_index_promises_is_named(tmp_path):
    saved(tmp_path)
    where = shard(tmp_path)
    file = tmp_path / where[A_LOG]
    save_file({k: v for k, v in load_file(file).items() if k != A_LOG}, file)
    refused(tmp_path, f"{file} lacks {A_LOG}, which the index promises")


def test_an_a_log_whose_padding_is_not_zero_is_refused(tmp_path):
    saved(tmp_path)
    padded = load_file(tmp_path / "model.safetensors")[A_LOG]
    assert padded.shape == (128,)
    assert not padded[2:].any()
    padded[127] = 1e-3
    rewrite(tmp_path, **{A_LOG: padded})
    refused(tmp_path, f"{A_LOG} has 128 entries for 2 heads", "not zero")


def test_an_a_log_without_padding_or_in_the_other_familys_shape_loads(tmp_path):
    model = saved(tmp_path)
    a_log = model.layers[0].self_attn.A_log.detach()
    for stored in (a_log.clone(), a_log.view(1, 1, 2, 1).clone()):
        rewrite(tmp_path, **{A_LOG: stored})
        assert_same(model, load_model(tmp_path))
    rewrite(tmp_path, **{A_LOG: torch.zeros(3)})
    refused(tmp_path, f"{A_LOG} is [3] instead of [2]")


def test_directories_that_hold_no_model_are_refused(tmp_path):
    refused(tmp_path / "nowhere", "nowhere is not a directory: give the folder")
    refused(tmp_path, "config.json does not exist: give")
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "holds no *.safetensors file; give the directory of a complete model")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")], ids=str)
def test_a_failed_save_leaves_the_earlier_model_and_no_rubbish(tmp_path, monkeypatch, error):
    model = saved(tmp_path)

    def half_written(tensors, path, metadata):
        Path(path).write_bytes(b"half of a fi")
        raise error

    monkeypatch.setattr(hub, "save_file", half_written)
    other = random_model(k3_config(hidden_size=18), torch.float32)
    with pytest.raises(
        UserError, match=r"cannot write the model to .*No space left on device.*earlier files there are untouched"
    ) as caught:
        save_model(other, tmp_path)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(model, load_model(tmp_path))


def test_weights_and_config_are_replaced_together_or_not_at_all(tmp_path, monkeypatch):
    model = saved(tmp_path)
    written = Path.write_text

    def full(path, *arguments, **options):
        if "config.json" in path.name:
            raise OSError(28, "No space left on device")
        return written(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="earlier files there are untouched"):
        save_model(random_model(k3_config(hidden_size=18), torch.float32), tmp_path)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(model, load_model(tmp_path))


def test_files_are_synced_before_they_take_the_old_ones_place(tmp_path, monkeypatch):
    saved(tmp_path)
    events = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("sync"), sync(fd)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append(f"replace {target.name}"), replace(self, target))[1])
    saved(tmp_path)
    assert events == ["sync", "sync", "replace model.safetensors", "replace config.json"]


def test_saving_beside_other_weights_is_refused_because_they_would_be_read_instead(tmp_path):
    model = saved(tmp_path)
    shard(tmp_path)
    with pytest.raises(UserError, match=r"holds other weights .* save to another directory"):
        save_model(model, tmp_path)
    assert_same(model, load_model(tmp_path))


def test_saving_where_a_file_stands_is_refused(tmp_path):
    file = tmp_path / "model"
    file.write_text("")
    with pytest.raises(UserError, match="cannot write the model to"):
        save_model(random_model(k3_config(), torch.float32), file)
    assert file.read_text() == ""


@each_golden
def test_a_model_in_training_mode_saves_values_and_not_graphs(name, tmp_path):
    model = load_model(GOLDEN / name)
    ids = random_ids(5)
    model(ids, SequenceLayout((5,))).sum().backward()
    save_model(model, tmp_path)
    assert_same(model, load_model(tmp_path))
