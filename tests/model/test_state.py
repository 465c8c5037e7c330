"""What a slot holds, in which dtype, and that clearing one leaves the others alone."""

import torch

from perilune.model.state import SequenceState
from tests.model.tiny_models import k3_config, kimi_linear_config


def test_each_layer_has_the_state_of_its_kind():
    config = k3_config()
    state = SequenceState(config, num_slots=3, max_length=11)
    assert set(state.recurrent) == set(state.conv) == {0, 2, 3}
    assert set(state.latents) == {1, 4}
    assert state.recurrent[0].shape == (3, 2, 6, 6)
    assert state.conv[0].shape == (3, 3, 3 * 12)
    assert state.latents[1].shape == (3, 11, 8 + 2)
    assert not any(t.any() for t in (*state.recurrent.values(), *state.conv.values(), *state.latents.values()))


def test_recurrent_states_are_never_narrower_than_fp32():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        state = SequenceState(kimi_linear_config(), 1, 4, dtype)
        assert state.recurrent[0].dtype == wide
        assert state.conv[0].dtype == state.latents[2].dtype == dtype


def test_clear_zeroes_its_slots_whatever_they_held_and_no_other():
    state = SequenceState(k3_config(), num_slots=4, max_length=5)
    tensors = (*state.recurrent.values(), *state.conv.values(), *state.latents.values())
    for tensor in tensors:
        tensor[:] = torch.randn_like(tensor)
        tensor[2] = float("nan")
    before = [t.clone() for t in tensors]
    state.clear([2, 0])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[0, 2]], torch.zeros_like(tensor[[0, 2]]))
        assert torch.equal(tensor[[1, 3]], old[[1, 3]])


def test_clearing_nothing_changes_nothing():
    state = SequenceState(k3_config(), num_slots=2, max_length=5)
    for tensor in state.latents.values():
        tensor.fill_(1)
    state.clear([])
    assert all((t == 1).all() for t in state.latents.values())
