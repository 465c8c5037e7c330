"""Runner: the network at work on one step's tokens, over the pooled states.

Decoding sequences and prompt chunks are two forwards: in the first every sequence brings one token, which takes the recurrent and
absorbed paths, and no prompt that happens to be read at the same time changes how it is computed.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.model.batch import SequenceLayout
from perilune.model.decoder import Decoder
from perilune.model.state import SequenceState
from perilune.moe.router import Routing
from perilune.serve.scheduler import Chunk, StepPlan
from perilune.serve.sequence import Sequence


@dataclass(frozen=True)
class Logits:
    """Of the sequences whose unseen tokens are all read: `values` [sequences, vocab_size]."""

    sequences: tuple[Sequence, ...]
    values: Tensor


class _ExpertRecorder:
    """Collects the routing of one forward."""

    def __init__(self, config_top_k: int) -> None:
        self._top_k = config_top_k
        self._layers: list[Tensor] = []

    def observe(self, layer: int, routing: Routing) -> None:
        self._layers.append(routing.experts)

    def experts(self, num_tokens: int) -> Tensor:
        """[tokens, moe_layers, top_k] int64."""
        return torch.stack(self._layers, 1) if self._layers else torch.empty(num_tokens, 0, self._top_k, dtype=torch.int64)


class Runner:
    """Runs plans on a model. The state is updated in place at the sequences' slots."""

    def __init__(self, model: Decoder, state: SequenceState) -> None:
        self._model = model
        self._state = state

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Logits:
        """Computes the plan and moves its sequences on; the logits that follow those now read to the end, decoding ones first."""
        parts = []
        if plan.decode:
            parts.append(self._forward([Chunk(sequence, 1) for sequence in plan.decode]))
        if plan.prefill:
            parts.append(self._forward(plan.prefill))
        return Logits(tuple(s for part in parts for s in part.sequences), torch.cat([part.values for part in parts]))

    def _forward(self, chunks: Several[Chunk]) -> Logits:
        ids: list[int] = []
        for chunk in chunks:
            seen = chunk.sequence.num_seen
            ids += chunk.sequence.ids[seen : seen + chunk.count]
        slots = []
        for chunk in chunks:
            assert chunk.sequence.slot is not None
            slots.append(chunk.sequence.slot)
        layout = SequenceLayout(tuple(c.count for c in chunks), tuple(c.sequence.num_seen for c in chunks), tuple(slots))
        is_read = [c.count == c.sequence.num_unseen for c in chunks]
        rows = layout.last_tokens()[torch.tensor(is_read)]
        recorder = None
        if any(c.sequence.request.record_experts for c in chunks):
            recorder = _ExpertRecorder(self._model.config.num_experts_per_token)
        observer = recorder.observe if recorder else None
        logits = self._model(torch.tensor(ids), layout, self._state, observer=observer, rows=rows)
        experts = torch.split(recorder.experts(layout.num_tokens), list(layout.lengths)) if recorder else [None] * len(chunks)
        for chunk, recorded in zip(chunks, experts, strict=True):
            chunk.sequence.see(chunk.count, recorded if chunk.sequence.request.record_experts else None)
        return Logits(tuple(c.sequence for c, read in zip(chunks, is_read, strict=True) if read), logits)
