"""StatePool: the slots that sequences keep their state in, each lent to one at a time."""

import torch

from perilune.errors import UserError
from perilune.model.config import ModelConfig
from perilune.model.footprint import footprint
from perilune.model.state import SequenceState
from perilune.serve.memory import free_memory


class StatePool:
    """`num_slots` states for sequences of up to `max_length` tokens; a slot is cleared before it is lent.

    Raises UserError if the states would not fit the memory that is free.
    """

    def __init__(self, config: ModelConfig, num_slots: int, max_length: int, dtype: torch.dtype) -> None:
        needed, free = pool_bytes(config, num_slots, max_length, dtype), free_memory()
        if needed > free:
            raise UserError(
                f"{num_slots} sequences of up to {max_length} tokens need {needed / 1e9:.1f} GB for their states and {free / 1e9:.1f} GB "
                "are free: lower --max-sequences or --max-length"
            )
        self.state = SequenceState(config, num_slots, max_length, dtype)
        self._free = list(range(num_slots))
        self._lent: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self) -> int:
        """A cleared slot. Raises IndexError when none is free."""
        slot = self._free.pop()
        self._lent.add(slot)
        return slot

    def take_back(self, slot: int, num_tokens: int | None) -> None:
        """The sequence in `slot` is done, having had `num_tokens` in its state (None: unknown). Raises KeyError for a slot not lent."""
        self._lent.remove(slot)
        self.state.clear([slot], num_tokens)
        self._free.append(slot)

    def check(self, in_use: set[int]) -> None:
        """Every slot is either free or in use by exactly those who think so. Raises AssertionError otherwise."""
        assert self._lent == in_use, f"lent {self._lent}, in use {in_use}"
        assert sorted([*self._free, *self._lent]) == list(range(self.state.num_slots)), (self._free, self._lent)


def pool_bytes(config: ModelConfig, num_slots: int, max_length: int, dtype: torch.dtype) -> int:
    """What the states take once they are full."""
    cost = footprint(config)
    # The footprint counts convolutions and latents in bf16 and recurrent states in fp32, which they are whatever the dtype.
    wider = dtype.itemsize // 2
    recurrent = 2 * (cost.state_bytes_fp32 - cost.state_bytes)
    convolutions = cost.state_bytes_fp32 - recurrent
    return num_slots * (recurrent * max(1, dtype.itemsize // 4) + wider * (convolutions + max_length * cost.bytes_per_token))
