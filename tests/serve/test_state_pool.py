"""Slots are lent to one sequence at a time, and clean."""

import pytest
import torch

from perilune.errors import UserError
from perilune.model.state import SequenceState
from perilune.serve import state_pool
from perilune.serve.state_pool import StatePool, pool_bytes
from tests.model.tiny_models import k3_config, kimi_linear_config


def tensors(state: SequenceState) -> list[torch.Tensor]:
    return [*state.recurrent.values(), *state.conv.values(), *state.latents.values()]


def test_a_slot_is_lent_once_at_a_time_and_comes_back_clean():
    pool = StatePool(k3_config(), 2, 10, torch.float32)
    slots = {pool.lend(), pool.lend()}
    assert slots == {0, 1} and pool.num_free == 0
    with pytest.raises(IndexError):
        pool.lend()
    for tensor in tensors(pool.state):
        tensor[:, :4] = float("nan")
    pool.take_back(1, 4)
    pool.check({0})
    for tensor in tensors(pool.state):
        assert not tensor[1].any() and tensor[0].isnan().any(), "only the slot taken back is cleared"
    assert pool.lend() == 1
    pool.check({0, 1})
    with pytest.raises(KeyError):
        pool.take_back(5, 0)


def test_check_notices_a_slot_that_leaked():
    pool = StatePool(k3_config(), 2, 10, torch.float32)
    slot = pool.lend()
    with pytest.raises(AssertionError):
        pool.check(set())
    pool._lent.remove(slot)
    with pytest.raises(AssertionError):
        pool.check(set())


@pytest.mark.parametrize("config", [k3_config(), kimi_linear_config()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pool_bytes_are_those_of_the_tensors(config, dtype):
    state = SequenceState(config, 3, 50, dtype)
    assert pool_bytes(config, 3, 50, dtype) == sum(t.nbytes for t in tensors(state))


def test_states_that_do_not_fit_the_memory_are_refused_with_the_options_to_change(monkeypatch):
    monkeypatch.setattr(state_pool, "free_memory", lambda: 10**5)
    with pytest.raises(UserError, match=r"1000 sequences of up to 1000 tokens need 0\.\d GB .* lower --max-sequences or --max-length"):
        StatePool(k3_config(), 1000, 1000, torch.float32)
