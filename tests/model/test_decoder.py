"""One forward for everything: any split of any sequences in any company gives the logits of the packed forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kda.gates import log_decay
from perilune.model import batch
from perilune.model.attention_residuals import AttentionResidual
from perilune.model.batch import SequenceLayout
from perilune.model.decoder import Decoder
from perilune.model.kda_attention import KDAAttention
from perilune.model.norm import RMSNorm
from perilune.model.presets import k3_tiny
from perilune.model.state import SequenceState
from tests.model.tiny_models import cast, k3_config, kimi_linear_config, packed, random_ids, random_model

CONFIGS = {"k3": k3_config(), "kimi-linear": kimi_linear_config()}
MODELS = {name: random_model(config) for name, config in CONFIGS.items()}
MAX_LENGTH = 40
each_model = pytest.mark.parametrize("name", CONFIGS)


def new_state(model: Decoder, num_slots: int = 4) -> SequenceState:
    dtype = next(model.parameters()).dtype
    return SequenceState(model.config, num_slots, MAX_LENGTH, dtype)


def tensors(state: SequenceState) -> list[torch.Tensor]:
    return [*state.recurrent.values(), *state.conv.values(), *state.latents.values()]


def run(model: Decoder, state: SequenceState, slots: dict[int, int], done: dict[int, int], pieces: dict[int, torch.Tensor]):
    """One mixed batch of pieces of sequences; returns each piece's logits and moves `done` on."""
    layout = SequenceLayout(
        tuple(len(p) for p in pieces.values()), tuple(done[s] for s in pieces), tuple(slots[s] for s in pieces)
    )  # fmt: skip
    logits = model(torch.cat(list(pieces.values())), layout, state).split(layout.lengths)
    for sequence, piece in pieces.items():
        done[sequence] += len(piece)
    return dict(zip(pieces, logits, strict=True))


@st.composite
def schedules(draw):
    """Lengths of sequences, and batches of (sequence, tokens): pieces of any size, zero included, in any order, until all are done."""
    lengths = draw(st.lists(st.integers(1, 36), min_size=1, max_size=4))
    left = dict(enumerate(lengths))
    batches = []
    while any(left.values()):
        members = draw(st.permutations([s for s in left if draw(st.booleans()) or left[s]]))
        sizes = {s: min(left[s], draw(st.sampled_from([0, 1, 1, 2, 3, 15, 16, 17, 36]))) for s in members}
        if not any(sizes.values()):
            sizes = {s: left[s] for s in members}
        batches.append(sizes)
        for s, n in sizes.items():
            left[s] -= n
    return lengths, batches


@each_model
@given(schedule=schedules(), slots=st.permutations(range(4)), wide_buckets=st.booleans())
@settings(max_examples=30, deadline=None)
@torch.inference_mode()
def test_any_split_into_prefill_chunks_and_decodes_equals_the_packed_forward(name, schedule, slots, wide_buckets):
    model = MODELS[name]
    lengths, batches = schedule
    sequences = [random_ids(n, seed=i) for i, n in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_FREE_PADDING", 16384 if wide_buckets else 0)
        expected = packed(model, sequences)
        state, done = new_state(model), dict.fromkeys(range(4), 0)
        got: dict[int, list[torch.Tensor]] = {s: [] for s in range(len(sequences))}
        for sizes in batches:
            pieces = {s: sequences[s][done[s] : done[s] + n] for s, n in sizes.items()}
            for s, logits in run(model, state, dict(enumerate(slots)), done, pieces).items():
                got[s].append(logits)
    for s, reference in enumerate(expected):
        assert (torch.cat(got[s]) - reference).abs().max() < 1e-9


@each_model
@torch.inference_mode()
def test_sequences_of_a_packed_batch_do_not_see_each_other(name):
    model = MODELS[name]
    sequences = [random_ids(n, seed=n) for n in (17, 1, 33)]
    for together, sequence in zip(packed(model, sequences), sequences, strict=True):
        assert (together - packed(model, [sequence])[0]).abs().max() < 1e-9


@each_model
@torch.inference_mode()
def test_logits_depend_on_no_later_token(name):
    model, ids = MODELS[name], random_ids(40)
    changed = torch.cat((ids[:21], (ids[21:] + 1) % 32))
    (a,), (b,) = packed(model, [ids]), packed(model, [changed])
    assert (a[:21] - b[:21]).abs().max() < 1e-12
    assert ((a[21:] - b[21:]).abs().amax(-1) > 1e-3).all()


@each_model
@torch.inference_mode()
def test_a_slot_used_again_after_clear_equals_a_fresh_one_bit_for_bit(name):
    model = MODELS[name]
    fresh, used = new_state(model), new_state(model)
    run(model, used, {0: 2}, {0: 0}, {0: random_ids(30, seed=9)})
    used.latents[model.config.mla_layers[0]][2, 5] = float("nan")
    used.clear([2])
    for state in (fresh, used):
        state.logits = []
        done = {0: 0}
        for piece in random_ids(12).split([5, 1, 6]):
            state.logits.append(run(model, state, {0: 2}, done, {0: piece})[0])
    assert torch.equal(torch.cat(fresh.logits), torch.cat(used.logits))
    for a, b in zip(tensors(fresh), tensors(used), strict=True):
        assert torch.equal(a, b)


@each_model
@pytest.mark.parametrize("pieces", [(1, 1), (4, 1), (0, 3)], ids=str)
@torch.inference_mode()
def test_slots_outside_the_batch_keep_their_bits(name, pieces):
    model = MODELS[name]
    state = new_state(model, num_slots=5)
    for tensor in tensors(state):
        tensor.copy_(torch.randn_like(tensor))
        tensor[3] = 1e30
        tensor[4] = float("nan")
    before = [t.clone() for t in tensors(state)]
    logits = run(model, state, {0: 1, 1: 2}, {0: 3, 1: 8}, {i: random_ids(n, seed=i) for i, n in enumerate(pieces)})
    assert all(x.isfinite().all() for x in logits.values())
    for tensor, old in zip(tensors(state), before, strict=True):
        assert torch.equal(tensor[[0, 3, 4]].view(torch.int64), old[[0, 3, 4]].view(torch.int64))
        assert not torch.equal(tensor[2], old[2])


@each_model
@torch.inference_mode()
def test_a_sequence_without_new_tokens_keeps_its_state(name):
    model = MODELS[name]
    state = new_state(model)
    done = {0: 0, 1: 0}
    run(model, state, {0: 0, 1: 1}, done, {0: random_ids(9), 1: random_ids(5)})
    before = [t[1].clone() for t in tensors(state)]
    run(model, state, {0: 0, 1: 1}, done, {0: random_ids(3), 1: random_ids(0)})
    for tensor, old in zip(tensors(state), before, strict=True):
        assert torch.equal(tensor[1], old)


@each_model
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
@torch.inference_mode()
def test_a_batch_without_tokens_gives_no_logits(name, lengths):
    model = MODELS[name]
    ids = torch.zeros(0, dtype=torch.int64)
    assert model(ids, SequenceLayout(lengths)).shape == (0, 32)
    layout = SequenceLayout(lengths, (0,) * len(lengths), tuple(range(len(lengths))))
    assert model(ids, layout, new_state(model)).shape == (0, 32)


@each_model
@torch.inference_mode()
def test_rows_give_the_same_logits_of_the_chosen_tokens(name):
    model, layout = MODELS[name], SequenceLayout((9, 0, 4))
    ids = random_ids(13)
    rows = layout.last_tokens()
    assert rows.tolist() == [8, 12]
    assert (model(ids, layout, rows=rows) - model(ids, layout)[rows]).abs().max() < 1e-12


@each_model
def test_replaying_recorded_experts_gives_identical_logits_and_gradients(name):
    model, layout, ids = MODELS[name], SequenceLayout((9, 4)), random_ids(13)
    routings = {}
    logits = model(ids, layout, observer=routings.__setitem__)
    recorded = torch.stack([routings[i].experts for i in range(len(routings))])
    replayed = model(ids, layout, replay=recorded)
    assert torch.equal(replayed, logits)
    gate = model.layers[1].mlp.gate.weight
    (a,), (b,) = (torch.autograd.grad(x.square().sum(), gate) for x in (logits, replayed))
    assert torch.equal(a, b)
    other = (recorded + 1) % model.config.num_experts
    assert not torch.equal(model(ids, layout, replay=other), logits)


@each_model
@torch.inference_mode()
def test_the_observer_gets_one_routing_per_moe_layer_and_changes_nothing(name):
    model, layout, ids = MODELS[name], SequenceLayout((9, 4)), random_ids(13)
    heard = []
    logits = model(ids, layout, observer=lambda index, routing: heard.append((index, routing)))
    assert [index for index, _ in heard] == list(range(len(model.config.moe_layers)))
    assert all(routing.experts.shape == (13, 2) for _, routing in heard)
    assert torch.equal(model(ids, layout), logits)


@pytest.mark.parametrize("first_k_dense", [0, 2, 5])
@torch.inference_mode()
def test_the_first_layers_are_dense_and_the_rest_have_experts(first_k_dense):
    model = random_model(k3_config(first_k_dense=first_k_dense))
    heard = []
    model(random_ids(3), SequenceLayout((3,)), observer=lambda index, _: heard.append(index))
    assert heard == list(range(5 - first_k_dense))
    assert [hasattr(layer.mlp, "gate") for layer in model.layers] == [False] * first_k_dense + [True] * (5 - first_k_dense)


@each_model
@pytest.mark.parametrize("fresh", [True, False], ids=["as initialised", "random"])
def test_every_parameter_gets_a_finite_gradient_but_layer_0s_unused_read(name, fresh):
    model = Decoder(CONFIGS[name])
    model.reset_parameters(1)
    if not fresh:
        model = random_model(CONFIGS[name])
    model(random_ids(40), SequenceLayout((25, 15))).square().sum().backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert without == ({f"layers.0.self_attention_res.{n}" for n in ("norm.weight", "proj")} if name == "k3" else set())
    for n, parameter in model.named_parameters():
        if n not in without:
            assert parameter.grad.isfinite().all(), n
            # With pseudo-queries at zero, as they must start, the norms beside them cannot learn yet.
            assert parameter.grad.any() or (fresh and "_res.norm" in n), n


@torch.inference_mode()
def test_attention_residuals_follow_the_published_block_rule():
    model, ids = MODELS["k3"], random_ids(7)
    layout = SequenceLayout((7,))
    bank, prefix = [], model.embed_tokens(ids)

    def mix(read, sources):
        stacked = torch.stack(sources)
        keys = stacked / (stacked.square().mean(-1, keepdim=True) + 1e-5).sqrt() * read.norm.weight
        return (torch.softmax(keys @ read.proj[0], 0).unsqueeze(-1) * stacked).sum(0)

    for i, layer in enumerate(model.layers):
        h = mix(layer.self_attention_res, [*bank, prefix]) if bank else prefix
        starts = i % 2 == 0
        if starts:
            bank.append(prefix)
        y = layer.self_attn(layer.input_layernorm(h), layout, None)
        prefix = y if starts else prefix + y
        h = layer.post_attention_layernorm(mix(layer.mlp_res, [*bank, prefix]))
        prefix = prefix + (layer.mlp(h, None, None) if i else layer.mlp(h))
    assert len(bank) == 3
    expected = model.lm_head(model.norm(mix(model.output_attn_res, [*bank, prefix])))
    assert (model(ids, layout) - expected).abs().max() < 1e-11


@each_model
@torch.inference_mode()
def test_every_sublayer_in_bf16_is_within_its_rounding_of_fp32(name):
    narrow = random_model(CONFIGS[name], torch.bfloat16)
    wide = cast(random_model(CONFIGS[name], torch.bfloat16), torch.float32)
    x, layout = torch.randn(30, 16).bfloat16(), SequenceLayout((20, 10))
    replay = torch.randint(5, (30, 1)) + torch.tensor([0, 1])
    for i, (a, b) in enumerate(zip(narrow.layers, wide.layers, strict=True)):
        pairs = [(a.self_attn(x, layout, None), b.self_attn(x.float(), layout, None))]
        pairs.append((a.mlp(x, None, replay), b.mlp(x.float(), None, replay)) if i else (a.mlp(x), b.mlp(x.float())))
        for value, reference in pairs:
            assert value.dtype == torch.bfloat16
            assert (value - reference).norm() < 0.03 * reference.norm()


@each_model
@torch.inference_mode()
def test_bf16_weights_run_in_every_mode_and_stay_near_fp32(name):
    narrow = random_model(CONFIGS[name], torch.bfloat16)
    wide = cast(random_model(CONFIGS[name], torch.bfloat16), torch.float32)
    ids, layout = random_ids(30), SequenceLayout((20, 10))
    routings = {}
    expected = wide(ids, layout, observer=routings.__setitem__)
    # Rounding flips choices near a tie, so they are fixed. What is left is rounding, which random weights blow up for a token or two.
    recorded = torch.stack([routings[i].experts for i in range(len(routings))])
    logits = narrow(ids, layout, replay=recorded)
    state = new_state(narrow)
    held = [
        narrow(ids[a:b], SequenceLayout((b - a,), (a,), (1,)), state, replay=recorded[:, a:b])
        for a, b in ((0, 12), (12, 13), (13, 20))
    ]  # fmt: skip
    assert state.recurrent[0].dtype == torch.float32
    for value, reference in ((logits, expected), (torch.cat(held), expected[:20])):
        assert value.dtype == torch.float32
        assert ((value - reference).norm(dim=-1) / reference.norm(dim=-1)).median() < 0.15


@pytest.mark.parametrize(
    ("ids", "layout", "with_state", "message"),
    [
        (5, SequenceLayout((6,)), False, r"ids must be one flat row of the layout's 6 tokens, got shape \(5,\)"),
        ((1, 6), SequenceLayout((6,)), False, r"ids must be one flat row of the layout's 6 tokens, got shape \(1, 6\)"),
        (6, SequenceLayout((6,), (3,)), False, "earlier tokens or slots: pass the state that holds them"),
        (6, SequenceLayout((6,), (0,), (1,)), False, "earlier tokens or slots: pass the state that holds them"),
        (6, SequenceLayout((6,)), True, "needs a slot for each sequence"),
        (6, SequenceLayout((6,), (0,), (4,)), True, r"slots \(4,\) lie outside the state's 4"),
        (6, SequenceLayout((6,), (0,), (-1,)), True, r"slots \(-1,\) lie outside the state's 4"),
        (6, SequenceLayout((6,), (35,), (1,)), True, "a sequence would grow to 41 tokens; the state holds 40"),
    ],
)
def test_ids_layout_and_state_that_do_not_fit_are_refused(ids, layout, with_state, message):
    model = MODELS["k3"]
    state = new_state(model) if with_state else None
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(ids, dtype=torch.int64), layout, state)


@pytest.mark.parametrize("shape", [(3, 6, 2), (5, 6, 2), (4, 5, 2), (4, 6, 1), (4, 6)], ids=str)
def test_replayed_experts_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"\[moe_layers, tokens, top_k\] \(4, 6, 2\), got"):
        MODELS["k3"](random_ids(6), SequenceLayout((6,)), replay=torch.zeros(shape, dtype=torch.int64))


def test_initialisation_depends_on_the_seed_alone():
    a, b, c = (Decoder(k3_tiny()) for _ in range(3))
    torch.manual_seed(1)
    a.reset_parameters(7)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    b.reset_parameters(7)
    assert torch.equal(torch.random.get_rng_state(), before)
    c.reset_parameters(8)
    for (n, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), n
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


def test_initial_values_follow_the_papers():
    config = k3_tiny()
    model = Decoder(config)
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan"))
    model.reset_parameters(3)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if name.endswith(("_proj.weight", "lm_head.weight", "embed_tokens.weight", "gate.weight", "experts_gate_up", "experts_down")):
            assert parameter.std().item() == pytest.approx(config.initializer_range, rel=0.15), name
            assert abs(parameter.mean().item()) < 0.2 * config.initializer_range, name
    for module in model.modules():
        if isinstance(module, AttentionResidual):
            assert not module.proj.any()
        if isinstance(module, RMSNorm):
            assert (module.weight == 1).all()
        if isinstance(module, KDAAttention):
            assert not module.A_log.any()
            retention = log_decay(torch.zeros(module.heads, module.head_dim), module.A_log, module.dt_bias, module.lower_bound).exp()
            assert ((retention > 0.62) & (retention < 0.996)).all()
            assert module.q_conv.abs().max() <= 0.5
    assert not any(buffer.any() for buffer in model.buffers())
