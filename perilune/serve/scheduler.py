"""Scheduler: which sequences get how many tokens of the next step. Pure bookkeeping, no tensors.

Every decoding sequence gets its one token in every step. Beside that a step reads prompts, up to a budget, in chunks that end on a
fixed grid. The budget goes round in pieces of one grid step, first come first: a long prompt holds up those who are decoding for no
longer than one step, and a short prompt that came after it need not wait until it is read.
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
        reading = [s for s in self.running if not s.is_decoding]
        counts = dict.fromkeys(reading, 0)
        budget = self._prefill_tokens
        while budget and reading:
            left = []
            for sequence in reading:
                piece = _next_piece(sequence, counts[sequence])
                if piece > budget:
                    budget = 0
                    break
                counts[sequence] += piece
                budget -= piece
                if counts[sequence] < sequence.num_unseen:
                    left.append(sequence)
            reading = left
        return StepPlan(decode, tuple(Chunk(sequence, count) for sequence, count in counts.items() if count))


def _next_piece(sequence: Sequence, count: int) -> int:
    """Tokens to the next grid line, or to the prompt's end, after `count` unseen ones."""
    seen = sequence.num_seen + count
    return min(PREFILL_GRID - seen % PREFILL_GRID, sequence.num_unseen - count)
