"""The ragged causal convolution against torch's own on each sequence, and its history against the whole sequence."""

import pytest
import torch
import torch.nn.functional as F

from perilune.kda.short_conv import short_convolution

CHANNELS = 3


def expected(x, weight, lengths, history=None):
    """conv1d sequence by sequence, the history or zeros in front."""
    width = weight.shape[1]
    outputs = []
    start = 0
    for n, length in enumerate(lengths):
        past = x.new_zeros(width - 1, x.shape[1]) if history is None else history[n]
        padded = torch.cat((past, x[start : start + length]))
        start += length
        if length:
            outputs.append(F.conv1d(padded.t()[None], weight[:, None], groups=x.shape[1])[0].t())
    return F.silu(torch.cat(outputs)) if outputs else x


def inputs(lengths, width=4, dtype=torch.float64):
    x, weight = torch.randn(sum(lengths), CHANNELS, dtype=dtype), torch.randn(CHANNELS, width, dtype=dtype)
    return x, weight, torch.randn(len(lengths), width - 1, CHANNELS, dtype=dtype)


@pytest.mark.parametrize("width", [2, 3, 4, 6])
@pytest.mark.parametrize("lengths", [(1,), (9,), (2, 5, 1), (0, 4, 0, 3), (1, 1, 1), (3,)], ids=str)
@pytest.mark.parametrize("with_history", [False, True])
def test_values_equal_conv1d_of_each_sequence(lengths, width, with_history):
    x, weight, history = inputs(lengths, width)
    past = history if with_history else None
    y, _ = short_convolution(x, weight, lengths, past)
    assert (y - expected(x, weight, lengths, past)).abs().max() < 1e-12


@pytest.mark.parametrize("lengths", [(2, 0, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("with_history", [False, True])
def test_gradcheck_of_inputs_weights_and_history(lengths, with_history):
    x, weight, history = (t.requires_grad_() for t in inputs(lengths))
    if with_history:
        assert torch.autograd.gradcheck(lambda *a: short_convolution(a[0], a[1], lengths, a[2])[0], (x, weight, history))
    else:
        assert torch.autograd.gradcheck(lambda *a: short_convolution(*a, lengths)[0], (x, weight))


@pytest.mark.parametrize("width", [2, 4, 6])
def test_history_carried_over_any_split_equals_one_pass(width):
    length = 9
    x, weight, history = inputs((length,), width)
    whole, end = short_convolution(x, weight, (length,), history)
    for cut in range(length + 1):
        # Pieces shorter than the kernel, and of length zero, included.
        first, middle = short_convolution(x[:cut], weight, (cut,), history)
        second, last = short_convolution(x[cut:], weight, (length - cut,), middle)
        assert (torch.cat((first, second)) - whole).abs().max() < 1e-12
        assert torch.equal(last, end)
    assert torch.equal(end[0], x[-(width - 1) :])


def test_new_history_of_a_piece_shorter_than_the_kernel_keeps_the_newest_old_inputs():
    x, weight, history = inputs((1, 0, 2), 4)
    _, after = short_convolution(x, weight, (1, 0, 2), history)
    assert torch.equal(after[0], torch.cat((history[0, 1:], x[:1])))
    assert torch.equal(after[1], history[1])
    assert torch.equal(after[2], torch.cat((history[2, 2:], x[1:])))


def test_single_tokens_take_a_shorter_path_to_the_same_result():
    lengths = (1, 1, 1)
    x, weight, history = inputs(lengths)
    y, after = short_convolution(x, weight, lengths, history)
    # An empty fourth sequence forces the general path.
    general, general_after = short_convolution(x, weight, (*lengths, 0), torch.cat((history, history[:1])))
    assert (y - general).abs().max() < 1e-14
    assert torch.equal(after, general_after[:3])


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
@pytest.mark.parametrize("with_history", [False, True])
def test_no_tokens_give_no_outputs_and_the_same_history(lengths, with_history):
    x, weight, history = inputs(lengths)
    y, after = short_convolution(x, weight, lengths, history if with_history else None)
    assert y.shape == (0, CHANNELS)
    assert torch.equal(after, history if with_history else torch.zeros_like(history))


def test_a_poisoned_neighbour_does_not_leak():
    lengths = (4, 3, 5)
    x, weight, history = inputs(lengths)
    clean, _ = short_convolution(x, weight, lengths, history)
    x[:4], x[7:], history[0], history[2] = (float("nan"),) * 4
    y, after = short_convolution(x, weight, lengths, history)
    assert torch.equal(y[4:7], clean[4:7])
    assert after[1].isfinite().all()


@pytest.mark.parametrize("lengths", [(1, 1), (2, 3)], ids=str)
def test_the_new_history_is_detached_and_in_the_dtype_of_the_inputs(lengths):
    x, weight, history = inputs(lengths)
    y, after = short_convolution(x.bfloat16().requires_grad_(), weight, lengths, history)
    assert y.dtype == after.dtype == torch.bfloat16
    assert y.requires_grad
    assert not after.requires_grad


def test_lengths_first_met_in_inference_mode_can_be_trained_on():
    # Lengths that no other test has, because the edges of a batch are remembered.
    lengths = (11, 0, 13)
    x, weight, history = inputs(lengths)
    with torch.inference_mode():
        short_convolution(x, weight, lengths, history)
    x.requires_grad_()
    grads = [
        torch.autograd.grad(f(x, weight, lengths, history).square().sum(), x)[0] for f in (lambda *a: short_convolution(*a)[0], expected)
    ]
    assert (grads[0] - grads[1]).abs().max() < 1e-12


def test_large_neighbours_cost_a_sequence_no_digits():
    lengths = (2, 3, 4)
    x, weight, history = inputs(lengths)
    alone, _ = short_convolution(x[2:5], weight, (3,), history[1:2])
    x[:2], x[5:] = 1e18, 1e18
    y, _ = short_convolution(x, weight, lengths, history)
    assert torch.equal(y[2:5], alone)
