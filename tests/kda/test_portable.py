"""The chunkwise form computes what the token loop computes, forward and backward, for any gate, any lengths and in bad company."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kda import portable
from tests.kda.samples import SCALE, Sample, by_chunks, by_loop, error_ratio, sample

BOUNDS = (None, -5.0)
LENGTHS = ((1,), (16,), (64,), (15, 16, 17), (5, 0, 40), (0, 0, 3), (1, 1, 1, 33, 1, 2), (0,), ())
NAMES = ("q", "k", "v", "g", "beta", "initial state")


def with_gradients(function, x: Sample, *arguments) -> tuple[torch.Tensor, ...]:
    """Outputs, final states and the six gradients of a loss that weights every entry of both differently."""
    inputs = Sample(*(t.clone().requires_grad_() for t in x.tensors()))
    o, final = function(inputs, *arguments)
    rng = torch.Generator().manual_seed(99)
    loss = sum((t * torch.randn(t.shape, generator=rng, dtype=torch.float64).to(t.dtype)).sum() for t in (o, final))
    return o.detach(), final.detach(), *torch.autograd.grad(loss, inputs.tensors())


@cache
def expected(lengths: tuple[int, ...], bound: float | None) -> tuple[torch.Tensor, ...]:
    return with_gradients(by_loop, sample(lengths, bound), lengths)


def assert_close(results, references, tolerance: float) -> None:
    for name, value, reference in zip(("o", "final state", *NAMES), results, references, strict=True):
        assert value.shape == reference.shape, name
        if value.numel():
            assert (value - reference).abs().max() < tolerance, name


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("lengths", [n for n in LENGTHS if sum(n)], ids=str)
def test_outputs_states_and_all_gradients_equal_the_token_loop(lengths, chunk, bound):
    results = with_gradients(by_chunks, sample(lengths, bound), lengths, chunk, bound)
    assert_close(results, expected(lengths, bound), 1e-9)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_a_batch_without_tokens_passes_states_and_their_gradients_through(lengths):
    x = sample(lengths, None)
    state = x.state.clone().requires_grad_()
    o, final = by_chunks(Sample(x.q, x.k, x.v, x.g, x.beta, state), lengths)
    assert o.shape == x.v.shape
    assert torch.equal(final, x.state)
    assert torch.equal(torch.autograd.grad(final.sum(), state)[0], torch.ones_like(x.state))


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any).map(tuple),
    chunk=st.sampled_from([16, 32, 64]),
    bound=st.sampled_from([None, -5.0, -0.1]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_random_ragged_lengths_equal_the_token_loop(lengths, chunk, bound, seed):
    x = sample(lengths, bound, heads=1, key_dim=3, value_dim=4, seed=seed)
    assert_close(with_gradients(by_chunks, x, lengths, chunk, bound), with_gradients(by_loop, x, lengths), 1e-9)


@pytest.mark.parametrize("bound", BOUNDS)
def test_gradcheck_agrees_by_finite_differences(bound):
    lengths = (1, 0, 17)
    x = sample(lengths, bound, heads=1, key_dim=2, value_dim=1)
    inputs = [t.clone().requires_grad_() for t in x.tensors()]
    # A promise of a wider bound than the gates have, so that the differences around a gate near the bound keep it.
    wider = None if bound is None else bound - 0.1
    assert torch.autograd.gradcheck(lambda *a: by_chunks(Sample(*a), lengths, 16, wider), inputs)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("chunk", [16, 64])
def test_fp32_stays_within_rounding_of_fp64(chunk, bound):
    lengths = (130, 7)
    x = sample(lengths, bound, key_dim=32, value_dim=32)
    results = with_gradients(by_chunks, x.to(torch.float32), lengths, chunk, bound)
    for name, value, reference in zip(
        ("o", "final state", *NAMES), results, with_gradients(by_chunks, x, lengths, chunk, bound), strict=True
    ):
        assert value.dtype == torch.float32
        assert error_ratio(value, reference) < 1e-5, name


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_steps_of_minus_a_thousand_erase_exactly_and_spoil_no_neighbour(chunk):
    lengths = (70,)
    x = sample(lengths, -0.05, key_dim=8, value_dim=8)
    for token in (0, 3, 15, 16, 31, 32, 40, 41, 63, 69):
        x.g[token, :, token % 8] = -1000.0
    results = with_gradients(by_chunks, x.to(torch.float32), lengths, chunk, None)
    references = with_gradients(by_loop, x, lengths)
    for name, value, reference in zip(("o", "final state", *NAMES), results, references, strict=True):
        assert value.isfinite().all(), name
        # Token by token: sums that carry the -1000 along would cost a thousand times this in the tokens around it.
        assert (value - reference).abs().max() < 3e-6 * max(1.0, float(reference.abs().max())), name


def test_gates_saturated_at_the_bound_for_256_tokens_stay_exact():
    lengths = (256,)
    x = sample(lengths, -5.0, key_dim=8, value_dim=8)
    x.g.fill_(-5.0)
    results = with_gradients(by_chunks, x.to(torch.float32), lengths, 16, -5.0)
    references = with_gradients(by_loop, x, lengths)
    for name, value, reference in zip(("o", "final state", *NAMES), results, references, strict=True):
        assert value.isfinite().all(), name
        # The gradient of g is what remains of two sums a thousand times larger.
        assert error_ratio(value, reference) < (1e-4 if name == "g" else 1e-5), name


@pytest.mark.parametrize("bound", BOUNDS)
def test_nearly_collinear_keys_written_at_full_strength_equal_the_loop(bound):
    lengths = (128,)
    x = sample(lengths, -1e-3, key_dim=16, value_dim=16)
    x.k.copy_(torch.nn.functional.normalize(x.k[:1] + 1e-3 * x.k, dim=-1))
    x.beta.fill_(1.0)
    o, final = by_loop(x, lengths)
    wide = by_chunks(x, lengths, 64, bound)
    assert (wide[0] - o).abs().max() < 1e-9
    assert (wide[1] - final).abs().max() < 1e-9
    narrow = by_chunks(x.to(torch.float32), lengths, 64, bound)
    assert error_ratio(narrow[0], o) < 1e-4
    assert error_ratio(narrow[1], final) < 1e-4


def test_without_writing_the_output_reads_the_decayed_initial_state():
    lengths = (40, 3)
    x = sample(lengths, None)
    x.beta.zero_()
    o, final = by_chunks(x, lengths)
    start = 0
    for n, length in enumerate(lengths):
        rows = slice(start, start + length)
        decayed = x.g[rows].cumsum(0).exp().unsqueeze(-1) * x.state[n]
        assert (o[rows] - SCALE * torch.einsum("thk,thkv->thv", x.q[rows], decayed)).abs().max() < 1e-12
        assert (final[n] - decayed[-1]).abs().max() < 1e-12
        start += length


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_later_tokens_leave_the_bits_of_earlier_outputs_alone(chunk, bound):
    lengths = (100,)
    x = sample(lengths, bound, key_dim=32, value_dim=32).to(torch.float32)
    other = sample(lengths, bound, key_dim=32, value_dim=32, seed=1).to(torch.float32)
    o, _ = by_chunks(x, lengths, chunk, bound)
    for kept in (1, 7, 16, 31, 63, 64, 65, 99):
        tokens = x.tensors()[:5]
        changed = Sample(*(torch.cat((a[:kept], b[kept:])) for a, b in zip(tokens, other.tensors()[:5], strict=True)), x.state)
        assert torch.equal(by_chunks(changed, lengths, chunk, bound)[0][:kept], o[:kept])
        shorter = Sample(*(t[:kept] for t in tokens), x.state)
        assert torch.equal(by_chunks(shorter, (kept,), chunk, bound)[0], o[:kept])


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_sequence_split_anywhere_with_its_state_carried_equals_one_pass(bound):
    length = 37
    x = sample((length,), bound)
    o, final = by_chunks(x, (length,), 16, bound)
    for cut in range(length + 1):
        first, state = by_chunks(Sample(*(t[:cut] for t in x.tensors()[:5]), x.state), (cut,), 16, bound)
        second, end = by_chunks(Sample(*(t[cut:] for t in x.tensors()[:5]), state), (length - cut,), 16, bound)
        assert (torch.cat((first, second)) - o).abs().max() < 1e-12
        assert (end - final).abs().max() < 1e-12


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_neighbours_in_the_batch_neither_change_nor_poison_a_sequence(bound, poison):
    lengths = (20, 17, 1, 33)
    rows = slice(20, 37)
    x = sample(lengths, bound).to(torch.float32)
    alone = Sample(*(t[rows] for t in x.tensors()[:5]), x.state[1:2])

    def loss_gradients(inputs: Sample, lengths: tuple[int, ...], own: slice, n: int):
        inputs = Sample(*(t.clone().requires_grad_() for t in inputs.tensors()))
        o, final = by_chunks(inputs, lengths, 16, bound)
        grads = torch.autograd.grad(o[own].square().sum() + final[n].square().sum(), inputs.tensors())
        return o[own].detach(), final[n].detach(), *(t[own] for t in grads[:5]), grads[5][n]

    reference = loss_gradients(alone, (17,), slice(None), 0)
    for name, value, ref in zip(("o", "final state", *NAMES), loss_gradients(x, lengths, rows, 1), reference, strict=True):
        assert error_ratio(value, ref) < 1e-6, name
    poisoned = Sample(*(t.clone() for t in x.tensors()))
    for tensor in (poisoned.q, poisoned.k, poisoned.v):
        tensor[:20], tensor[37:] = poison, poison
    poisoned.state[0], poisoned.state[2:] = poison, poison
    if poison != poison:
        poisoned.g[:20], poisoned.beta[37:] = poison, poison
    for name, value, ref in zip(("o", "final state", *NAMES), loss_gradients(poisoned, lengths, rows, 1), reference, strict=True):
        assert error_ratio(value, ref) < 1e-6, name


def test_an_empty_sequence_keeps_the_bits_of_its_state():
    lengths = (5, 0, 20, 0)
    x = sample(lengths, None).to(torch.float32)
    _, final = by_chunks(x, lengths)
    assert torch.equal(final[1], x.state[1])
    assert torch.equal(final[3], x.state[3])
    assert not torch.equal(final[0], x.state[0])


def test_the_given_initial_state_is_not_written_to():
    x = sample((20, 3), None)
    before = x.state.clone()
    by_chunks(x, (20, 3))
    assert torch.equal(x.state, before)


@pytest.mark.parametrize("chunk", [8, 0, 48, 128])
def test_other_chunk_sizes_are_refused(chunk):
    x = sample((4,), None)
    with pytest.raises(ValueError, match=f"chunk must be 16, 32 or 64, got {chunk}"):
        by_chunks(x, (4,), chunk)


def test_bf16_inputs_are_computed_in_the_dtype_of_the_state():
    lengths = (19, 4)
    x = sample(lengths, None)
    narrow = Sample(*(t.bfloat16() for t in x.tensors()[:5]), x.state.float())
    o, final = by_chunks(narrow, lengths)
    assert o.dtype == final.dtype == torch.float32
    wide, end = by_chunks(narrow.to(torch.float32), lengths)
    assert torch.equal(o, wide)
    assert torch.equal(final, end)


def test_gradients_arrive_in_each_inputs_own_dtype():
    x = sample((19,), None)
    inputs = Sample(*(t.to(torch.bfloat16 if i < 3 else torch.float32).requires_grad_() for i, t in enumerate(x.tensors())))
    o, _ = by_chunks(inputs, (19,))
    grads = torch.autograd.grad(o.sum(), inputs.tensors())
    assert [g.dtype for g in grads] == [t.dtype for t in inputs.tensors()]


def test_a_second_backward_is_refused_instead_of_being_wrong():
    x = sample((4,), None)
    v = x.v.clone().requires_grad_()
    o, _ = by_chunks(Sample(x.q, x.k, v, x.g, x.beta, x.state), (4,))
    (grad,) = torch.autograd.grad(o.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_backward_can_be_run_twice_when_the_graph_is_kept():
    x = sample((40,), None)
    inputs = [t.clone().requires_grad_() for t in x.tensors()]
    o, final = portable.chunk_kda(*inputs[:5], (40,), inputs[5], SCALE)
    loss = o.square().sum() + final.sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    for name, a, b in zip(NAMES, first, torch.autograd.grad(loss, inputs), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("bound", BOUNDS)
def test_lengths_first_met_in_inference_mode_can_be_trained_on(bound):
    # Lengths that no other test has, because the layout of a batch is remembered.
    lengths = (23, 0, 29)
    x = sample(lengths, bound)
    with torch.inference_mode():
        by_chunks(x, lengths, 32, bound)
    assert_close(with_gradients(by_chunks, x, lengths, 32, bound), with_gradients(by_loop, x, lengths), 1e-9)


def test_autocast_changes_no_bit_forward_or_backward():
    lengths = (40, 9)
    x = sample(lengths, None, key_dim=16, value_dim=16).to(torch.float32)
    references = with_gradients(by_chunks, x, lengths, 16, None)
    with torch.autocast("cpu", torch.bfloat16):
        for value, reference in zip(with_gradients(by_chunks, x, lengths, 16, None), references, strict=True):
            assert value.dtype == torch.float32
            assert torch.equal(value, reference)
        o, _ = by_loop(x, lengths)
    assert torch.equal(o, by_loop(x, lengths)[0])
