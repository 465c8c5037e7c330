"""The public operator: layouts, the work it takes over from its caller, decoding in place, and what it refuses."""

import pytest
import torch

from perilune.kda import chunk_kda, decode_kda_, fused_recurrent_kda, log_decay
from perilune.kda.reference import recurrent_kda

HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5
BACKENDS = (chunk_kda, fused_recurrent_kda)


def inputs(batch=1, tokens=20, dtype=torch.float64):
    q, k, g = (torch.randn(batch, tokens, HEADS, KEY_DIM, dtype=dtype) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    v, beta = torch.randn(batch, tokens, HEADS, VALUE_DIM, dtype=dtype), torch.rand(batch, tokens, HEADS, dtype=dtype)
    return {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": beta}


def states(sequences, dtype=torch.float64):
    return torch.randn(sequences, HEADS, KEY_DIM, VALUE_DIM, dtype=dtype)


@pytest.mark.parametrize("operator", BACKENDS)
def test_a_batch_is_the_recurrence_of_each_row(operator):
    x, start = inputs(batch=3), states(3)
    o, final = operator(**x, initial_state=start, output_final_state=True)
    for row in range(3):
        q, k, v, g, beta = (x[name][row] for name in ("q", "k", "v", "g", "beta"))
        expected, end = recurrent_kda(q, k, v, g, beta, (20,), start[row : row + 1], KEY_DIM**-0.5)
        assert (o[row] - expected).abs().max() < 1e-12
        assert (final[row] - end[0]).abs().max() < 1e-12


@pytest.mark.parametrize("operator", BACKENDS)
def test_cu_seqlens_equal_separate_calls(operator):
    bounds = [0, 3, 3, 19, 20]
    x, start = inputs(), states(4)
    o, final = operator(**x, initial_state=start, output_final_state=True, cu_seqlens=torch.tensor(bounds))
    for n in range(4):
        part = slice(bounds[n], bounds[n + 1])
        alone, end = operator(**{k: t[:, part] for k, t in x.items()}, initial_state=start[n : n + 1], output_final_state=True)
        assert torch.equal(alone, o[:, part]) or (alone - o[:, part]).abs().max() < 1e-13
        assert (final[n] - end[0]).abs().max() < 1e-13


@pytest.mark.parametrize("operator", BACKENDS)
def test_the_final_state_is_none_unless_asked_for_and_states_start_at_zero(operator):
    x = inputs()
    o, final = operator(**x)
    assert final is None
    zero, final = operator(**x, initial_state=torch.zeros_like(states(1)), output_final_state=True)
    assert torch.equal(o, zero)
    assert final.shape == (1, HEADS, KEY_DIM, VALUE_DIM)


@pytest.mark.parametrize("operator", BACKENDS)
def test_scale_multiplies_the_outputs_and_is_key_dim_to_the_minus_half_by_default(operator):
    x = inputs()
    o, _ = operator(**x)
    doubled, _ = operator(**x, scale=2 * KEY_DIM**-0.5)
    assert (doubled - 2 * o).abs().max() < 1e-12


@pytest.mark.parametrize("operator", BACKENDS)
@pytest.mark.parametrize("bound", [None, -5.0])
def test_norm_gate_and_sigmoid_in_the_kernel_equal_doing_them_outside(operator, bound):
    x = inputs()
    x["g"], x["beta"] = 3 * torch.randn_like(x["g"]), 3 * torch.randn_like(x["beta"])
    a_log, bias = torch.randn(HEADS, dtype=torch.float64), torch.randn(HEADS * KEY_DIM, dtype=torch.float64)
    inside, end = operator(
        **x, A_log=a_log, dt_bias=bias, lower_bound=bound, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    x["q"], x["k"] = (x[name] / (x[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in ("q", "k"))
    x["g"], x["beta"] = log_decay(x["g"], a_log, bias, bound), torch.sigmoid(x["beta"])
    outside, expected_end = operator(**x, output_final_state=True)
    assert (inside - outside).abs().max() < 1e-12
    assert (end - expected_end).abs().max() < 1e-12


def test_gradients_flow_through_everything_done_in_the_kernel():
    x = {name: t.requires_grad_() for name, t in inputs().items()}
    a_log = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(HEADS * KEY_DIM, dtype=torch.float64, requires_grad=True)
    start = states(1).requires_grad_()
    leaves = (*x.values(), a_log, bias, start)
    grads = []
    for operator in BACKENDS:
        o, final = operator(
            **x, A_log=a_log, dt_bias=bias, lower_bound=-5.0, initial_state=start, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        grads.append(torch.autograd.grad(o.square().sum() + final.square().sum(), leaves))
    for chunked, looped in zip(*grads, strict=True):
        assert looped.abs().max() > 0
        assert (chunked - looped).abs().max() < 1e-10


@pytest.mark.parametrize("operator", BACKENDS)
def test_narrow_inputs_give_narrow_outputs_and_fp32_states(operator):
    x = {name: t.bfloat16() for name, t in inputs().items()}
    o, final = operator(**x, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    wide, end = operator(**{name: t.float() for name, t in x.items()}, output_final_state=True)
    assert torch.equal(o, wide.bfloat16())
    assert torch.equal(final, end)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("safe_gate", [False, True])
def test_chunk_size_and_safe_gate_change_speed_and_not_results(chunk_size, safe_gate):
    x = inputs(tokens=70)
    x["g"] = x["g"].clamp(min=-5)
    o, _ = chunk_kda(**x, chunk_size=chunk_size, safe_gate=safe_gate)
    expected, _ = fused_recurrent_kda(**x)
    assert (o - expected).abs().max() < 1e-11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(20, HEADS, KEY_DIM)}, r"q and v must be \[batch, tokens, heads, dim\], got \(20, 2, 6\)"),
        ({"k": torch.zeros(1, 20, HEADS, 7)}, r"q, k and g must have one shape, got .*\(1, 20, 2, 7\)"),
        ({"g": torch.zeros(1, 20, HEADS, 1)}, r"q, k and g must have one shape, got .*\(1, 20, 2, 1\)"),
        ({"v": torch.zeros(1, 20, 4, VALUE_DIM)}, r"v and beta must share q's \[batch, tokens, heads\] \(1, 20, 2\), got \(1, 20, 4, 5\)"),
        ({"beta": torch.zeros(1, 19, HEADS)}, r"v and beta must share .*\(1, 19, 2\)"),
        ({"initial_state": torch.zeros(1, HEADS, VALUE_DIM, KEY_DIM)}, r"key-first .* \(1, 2, 6, 5\), got \(1, 2, 5, 6\)"),
        ({"initial_state": torch.zeros(2, HEADS, KEY_DIM, VALUE_DIM)}, r"key-first .* \(1, 2, 6, 5\), got \(2, 2, 6, 5\)"),
        ({"cu_seqlens": torch.tensor([0, 19])}, r"cu_seqlens must rise from 0 to the number of tokens \(20\), got \[0, 19\]"),
        ({"cu_seqlens": torch.tensor([1, 20])}, r"cu_seqlens must rise from 0 .* got \[1, 20\]"),
        ({"cu_seqlens": torch.tensor([0, 9, 8, 20])}, r"cu_seqlens must rise from 0 .* got \[0, 9, 8, 20\]"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, r"cu_seqlens must rise from 0"),
        ({"use_gate_in_kernel": True}, "the softplus gate needs A_log"),
        ({"use_gate_in_kernel": True, "lower_bound": 1.0}, "lower_bound .* must be negative, got 1.0"),
    ],
)
@pytest.mark.parametrize("operator", BACKENDS)
def test_arguments_that_do_not_fit_are_refused_by_name(operator, change, message):
    with pytest.raises(ValueError, match=message):
        operator(**(inputs() | change))


def test_cu_seqlens_with_a_real_batch_are_refused():
    with pytest.raises(ValueError, match="batch must be 1, got 2"):
        chunk_kda(**inputs(batch=2), cu_seqlens=torch.tensor([0, 20]))


def test_a_chunk_size_of_eight_is_refused():
    with pytest.raises(ValueError, match="chunk must be 16, 32 or 64, got 8"):
        chunk_kda(**inputs(), chunk_size=8)


def one_token(sequences, dtype=torch.float64):
    x = inputs(batch=1, tokens=sequences, dtype=dtype)
    return tuple(x[name][0] for name in ("q", "k", "v", "g", "beta"))


@pytest.mark.parametrize("poison", [1e30, float("nan")])
def test_decoding_is_one_step_of_the_recurrence_and_touches_no_other_slot(poison):
    slots = torch.tensor([5, 0, 3])
    pool = torch.full((7, HEADS, KEY_DIM, VALUE_DIM), poison, dtype=torch.float64)
    start = states(3)
    pool[slots] = start
    before = pool.clone()
    q, k, v, g, beta = one_token(3)
    o = decode_kda_(q, k, v, g, beta, pool, slots, 0.3)
    expected, end = recurrent_kda(q, k, v, g, beta, (1, 1, 1), start, 0.3)
    assert (o - expected).abs().max() < 1e-12
    assert (pool[slots] - end).abs().max() < 1e-12
    others = [1, 2, 4, 6]
    assert torch.equal(pool[others].view(torch.int64), before[others].view(torch.int64))


def test_repeated_decoding_equals_the_loop_over_the_sequence():
    x, start = inputs(tokens=12), states(1)
    pool = torch.cat((states(1), start))
    expected, final = fused_recurrent_kda(**x, initial_state=start, output_final_state=True)
    for t in range(12):
        q, k, v, g, beta = (x[name][:, t] for name in ("q", "k", "v", "g", "beta"))
        o = decode_kda_(q, k, v, g, beta, pool, torch.tensor([1]), KEY_DIM**-0.5)
        assert (o - expected[:, t]).abs().max() < 1e-12
    assert (pool[1] - final[0]).abs().max() < 1e-12


def test_decoding_computes_in_the_dtype_of_the_states_and_keeps_no_graph():
    q, k, v, g, beta = (t.requires_grad_() for t in one_token(2, torch.bfloat16))
    pool = states(2, torch.float32)
    expected = pool.clone()
    o = decode_kda_(q, k, v, g, beta, pool, torch.tensor([0, 1]), 1.0)
    assert o.dtype == torch.float32
    assert not o.requires_grad
    assert not pool.requires_grad
    wide = [t.detach().float() for t in (q, k, v, g, beta)]
    _, end = recurrent_kda(*wide, (1, 1), expected, 1.0)
    assert (pool - end).abs().max() < 1e-5


def test_decoding_under_autocast_keeps_the_precision_of_the_states():
    arguments, slots = one_token(2, torch.float32), torch.tensor([1, 0])
    pool = states(2, torch.float32)
    expected_pool = pool.clone()
    expected = decode_kda_(*arguments, expected_pool, slots, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        o = decode_kda_(*arguments, pool, slots, 0.5)
    assert torch.equal(o, expected)
    assert torch.equal(pool, expected_pool)
