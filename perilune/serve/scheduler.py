"""Scheduler: which sequences get how many tokens of the next step. Pure bookkeeping, no tensors.

Every decoding sequence gets its one token in every step. What the step's budget leaves goes to prompts, first come first served, in
chunks that end on a fixed grid: a long prompt is read in pieces and never holds up those who are decoding for longer than one step.
"""

from collections import deque
from dataclasses import dataclass

from perilune.serve.sequence import Sequence

PREFILL_GRID = 64
"""Chunks of a prompt end at multiples of this (and at its end), so that they are cut in the same places whatever else is running."""


@dataclass(frozen=True)
class Chunk:
    """The next `count` unseen tokens of a sequence."""

    sequence: Sequence
    count: int


@dataclass(frozen=True)
class StepPlan:
    """What one step computes."""

    decode: tuple[Sequence, ...]
    prefill: tuple[Chunk, ...]


class Scheduler:
    """Waiting and running sequences. `prefill_tokens` is the most prompt tokens of one step, a multiple of the grid."""

    def __init__(self, prefill_tokens: int) -> None:
        if prefill_tokens < PREFILL_GRID or prefill_tokens % PREFILL_GRID:
            raise ValueError(f"prefill_tokens must be a positive multiple of {PREFILL_GRID}, got {prefill_tokens}")
        self._prefill_tokens = prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> Sequence:
        """The longest-waiting sequence starts to run; the caller gives it a slot. Raises IndexError when none waits."""
        sequence = self.waiting.popleft()
        self.running.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """The sequence ends, wherever it is."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def plan(self) -> StepPlan:
        """The next step of what runs."""
        decode = tuple(s for s in self.running if s.is_decoding)
        budget = self._prefill_tokens
        prefill = []
        for sequence in self.running:
            if sequence.is_decoding:
                continue
            count = _grid_chunk(sequence, budget)
            if not count:
                break
            prefill.append(Chunk(sequence, count))
            budget -= count
        return StepPlan(decode, tuple(prefill))


def _grid_chunk(sequence: Sequence, budget: int) -> int:
    """As many unseen tokens as the budget allows, ending on the grid or at the prompt's end."""
    if sequence.num_unseen <= budget:
        return sequence.num_unseen
    return max(0, (sequence.num_seen + budget) // PREFILL_GRID * PREFILL_GRID - sequence.num_seen)
