"""The networks reproduce outputs of other implementations, within the tolerances that tests/golden/README.md states."""

from pathlib import Path

import numpy as np
import pytest
import torch

from perilune.model.batch import SequenceLayout
from perilune.model.hub import load_model
from perilune.model.state import SequenceState
from perilune.moe.router import Routing

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("k3-tiny", "kimi-linear-tiny")


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    return request.param, np.load(GOLDEN / request.param / "logits.npz"), np.load(GOLDEN / request.param / "trace.npz")


def _ids(data, sequence):
    return torch.from_numpy(np.concatenate([data[f"ids_{sequence}"], data[f"next_ids_{sequence}"][:12]]))


@torch.inference_mode()
def test_fp64_forward_equals_the_independent_reference(golden):
    name, data, _ = golden
    model = load_model(GOLDEN / name, torch.float64)
    for sequence in (0, 1):
        ids = _ids(data, sequence)
        logits = model(ids, SequenceLayout((len(ids),)))
        expected = np.concatenate([data[f"ref64_logits_{sequence}"], data[f"ref64_decode_logits_{sequence}"]])
        assert np.abs(logits.numpy() - expected).max() < 1e-9


@torch.inference_mode()
def test_fp32_forward_agrees_with_the_engine_for_both_sequences_in_one_batch(golden):
    name, data, _ = golden
    model = load_model(GOLDEN / name)
    parts = [_ids(data, 0), _ids(data, 1)]
    logits = model(torch.cat(parts), SequenceLayout(tuple(len(p) for p in parts)))
    for sequence, mine in enumerate(logits.split([len(p) for p in parts])):
        for kind in ("", "ref64_"):
            expected = np.concatenate([data[f"{kind}logits_{sequence}"], data[f"{kind}decode_logits_{sequence}"]])
            difference = np.abs(mine.numpy() - expected)
            assert difference.max() < (1e-3 if name == "k3-tiny" else 1e-4)
            assert difference.mean() < 5e-5
            assert (mine.numpy().argmax(-1) == expected.argmax(-1)).all()


@torch.inference_mode()
@pytest.mark.parametrize("cuts", [(), (1,), (16,), (5, 6, 33), tuple(range(1, 30))])
def test_prefill_in_any_chunks_then_decode_continues_greedily_as_the_engine_did(golden, cuts):
    name, data, _ = golden
    model = load_model(GOLDEN / name)
    prompts = [torch.from_numpy(data[f"ids_{i}"]) for i in (0, 1)]
    state = SequenceState(model.config, num_slots=3, max_length=96)
    slots = (2, 0)
    done = [0, 0]
    logits = [torch.empty(0, model.config.vocab_size) for _ in prompts]
    bounds = [[0, *(c for c in cuts if c < len(p)), len(p)] for p in prompts]
    for step in range(max(len(b) for b in bounds) - 1):
        pieces = [p[b[step] : b[step + 1]] if step + 1 < len(b) else p[:0] for p, b in zip(prompts, bounds, strict=True)]
        lengths = tuple(len(p) for p in pieces)
        out = model(torch.cat(pieces), SequenceLayout(lengths, tuple(done), slots), state)
        logits = [torch.cat(x) for x in zip(logits, out.split(lengths), strict=True)]
        done = [d + n for d, n in zip(done, lengths, strict=True)]
    for sequence in (0, 1):
        assert np.abs(logits[sequence].numpy() - data[f"logits_{sequence}"]).max() < 1e-3
    token = torch.stack([x[-1].argmax() for x in logits])
    for step in range(12):
        assert token.tolist() == [int(data[f"next_ids_{i}"][step]) for i in (0, 1)]
        out = model(token, SequenceLayout((1, 1), tuple(done), slots), state)
        for sequence in (0, 1):
            assert np.abs(out[sequence].numpy() - data[f"decode_logits_{sequence}"][step]).max() < 1e-3
        token = out.argmax(-1)
        done = [d + 1 for d in done]


@torch.inference_mode()
def test_sublayers_routing_and_states_match_the_trace(golden):
    name, _, trace = golden
    model = load_model(GOLDEN / name)
    seen: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.layers):
        layer.self_attn.register_forward_hook(lambda _m, _i, out, index=index: seen.__setitem__(f"attn_out.{index}", out))
        layer.mlp.register_forward_hook(lambda _m, _i, out, index=index: seen.__setitem__(f"mlp_out.{index}", out))
    routings: dict[int, Routing] = {}
    ids = torch.from_numpy(trace["ids"])
    state = SequenceState(model.config, num_slots=1, max_length=len(ids))
    model(ids, SequenceLayout((len(ids),), slots=(0,)), state, observer=routings.__setitem__)
    for key, out in seen.items():
        assert np.abs(out.numpy() - trace[key]).max() < 1e-3, key
    for layer in model.config.kda_layers:
        assert np.abs(state.recurrent[layer][0].numpy() - trace[f"state.{layer}"]).max() < 1e-3
    for moe, routing in routings.items():
        layer = moe + model.config.first_k_dense
        assert (routing.experts.sort(-1).values.numpy() == np.sort(trace[f"router_idx.{layer}"], -1)).all()
        order = routing.experts.argsort(-1).numpy()
        expected = np.take_along_axis(trace[f"router_w.{layer}"], np.argsort(trace[f"router_idx.{layer}"], -1), -1)
        assert np.abs(np.take_along_axis(routing.weights.numpy(), order, -1) - expected).max() < 1e-3
