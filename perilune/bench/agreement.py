"""Do engine and trainer agree? The engine samples with a trained network, in prefill chunks and single tokens, in a batch that changes
with every step; the trainer reads the whole sequences in packed forwards without a state. Both in fp32 from the same weights.

`engine_trainer_logprob_gap` is the 99.9th percentile of the difference in the sampled tokens' log-probabilities, over the positions
before the first one of their sequence where an MoE layer chose another set of experts. `replayed_*`: the trainer is forced to the
engine's experts, all positions. `expert_flips_per_10k`: in ten thousand choices of a token's set of experts by a layer. `runs` counts
the tokens, or the choices, behind a figure.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from perilune.bench.report import Figure
from perilune.model.batch import SequenceLayout
from perilune.model.decoder import Decoder
from perilune.model.hub import load_model
from perilune.model.tokenizer import Tokenizer, load_tokenizer
from perilune.serve.engine import Engine, EngineSettings
from perilune.serve.generation import Finished, Generation, GenerationError, GenerationRequest, SampledToken, SamplingParams
from perilune.train.recipe import Recipe, load_recipe
from perilune.train.run import train

GAP_GOAL, REPLAYED_MAX_GOAL, FLIPS_GOAL = 1e-5, 1e-4, 1.0
_SEQUENCES_PER_FORWARD = 8


@dataclass(frozen=True)
class Agreement:
    """`before_flip` and `replayed`: absolute differences in log-probability, one a sampled token. `decisions`: tokens times MoE layers."""

    before_flip: Tensor
    replayed: Tensor
    flips: int
    decisions: int
    sampled: int

    @property
    def flips_per_10k(self) -> float:
        return 1e4 * self.flips / self.decisions


def measure_agreement(engine: Engine, trainer: Decoder, requests: Sequence[GenerationRequest]) -> Agreement:
    """Samples all requests at once and reads them with the trainer. The requests must record experts."""
    generations = generate_all(engine, requests)
    parts = [_compare(trainer, generations[i : i + _SEQUENCES_PER_FORWARD]) for i in range(0, len(generations), _SEQUENCES_PER_FORWARD)]
    return Agreement(
        torch.cat([p.before_flip for p in parts]), torch.cat([p.replayed for p in parts]),
        sum(p.flips for p in parts), sum(p.decisions for p in parts), sum(p.sampled for p in parts),
    )  # fmt: skip


def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """The answers to requests that run together. Raises GenerationError if one fails."""
    tokens: dict[str, list[SampledToken]] = {r.request_id: [] for r in requests}
    ends: dict[str, Finished] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            match event.content:
                case SampledToken():
                    tokens[event.request_id].append(event.content)
                case Finished():
                    ends[event.request_id] = event.content
                case GenerationError():
                    raise event.content
    return [Generation(r, tuple(tokens[r.request_id]), ends[r.request_id]) for r in requests]


@dataclass(frozen=True)
class TrainerReading:
    """What the trainer finds in the sequences of some generations: per sequence the log-probability of each sampled token, and the
    experts [positions, moe_layers, top_k] it used."""

    logprobs: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]


@torch.no_grad()
def read_as_trainer(trainer: Decoder, generations: Sequence[Generation], *, replay: Sequence[Tensor] | None = None) -> TrainerReading:
    """One packed forward over prompts and answers. `replay`: the experts to use, as TrainerReading has them."""
    sequences = [torch.tensor(g.request.prompt_ids + g.token_ids) for g in generations]
    layout = SequenceLayout(tuple(len(s) for s in sequences))
    layers: list[Tensor] = []
    logits = trainer(
        torch.cat(sequences),
        layout,
        observer=lambda _, routing: layers.append(routing.experts),
        replay=torch.cat(list(replay)).transpose(0, 1).contiguous() if replay is not None else None,
    )
    logprobs = []
    rows_of_sequences = torch.split(torch.log_softmax(logits, -1), list(layout.lengths))
    for generation, sequence, rows in zip(generations, sequences, rows_of_sequences, strict=True):
        start = len(generation.request.prompt_ids)
        logprobs.append(rows[start - 1 : -1].gather(1, sequence[start:].unsqueeze(1)).squeeze(1))
    return TrainerReading(tuple(logprobs), torch.split(torch.stack(layers, 1), list(layout.lengths)))


def _compare(trainer: Decoder, generations: Sequence[Generation]) -> Agreement:
    own = read_as_trainer(trainer, generations)
    # The engine never read the last token: for it the trainer's own choice stands.
    recorded = []
    for generation, experts in zip(generations, own.experts, strict=True):
        assert generation.finished.experts is not None
        recorded.append(torch.cat((generation.finished.experts, experts[-1:])))
    forced = read_as_trainer(trainer, generations, replay=recorded)
    before_flip, replayed, flips, decisions = [], [], 0, 0
    for i, generation in enumerate(generations):
        sampled = torch.tensor(generation.logprobs, dtype=own.logprobs[i].dtype)
        is_flipped = (recorded[i].sort(-1).values != own.experts[i].sort(-1).values).any(-1)[:-1]
        first = int(is_flipped.any(-1).int().argmax()) if is_flipped.any() else len(is_flipped)
        # Token j was sampled from the logits of position prompt - 1 + j.
        clean = max(0, first - (len(generation.request.prompt_ids) - 1))
        before_flip.append((sampled - own.logprobs[i]).abs()[:clean])
        replayed.append((sampled - forced.logprobs[i]).abs())
        flips, decisions = flips + int(is_flipped.sum()), decisions + is_flipped.numel()
    return Agreement(torch.cat(before_flip), torch.cat(replayed), flips, decisions, sum(len(g.tokens) for g in generations))


def requests_from_text(tokenizer: Tokenizer, count: int, longest_prompt: int, longest_answer: int) -> list[GenerationRequest]:
    """Prompts of mixed lengths cut from a file of the standard library, each with its own seed and number of tokens to sample."""
    ids = tokenizer.encode_text(Path(argparse.__file__).read_text(encoding="utf-8"))
    random = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=random))

    requests = []
    for seed in range(count):
        start, length = number(0, len(ids) - longest_prompt), number(1, longest_prompt)
        sampling = SamplingParams(max_tokens=number(longest_answer // 8, longest_answer), seed=seed)
        requests.append(GenerationRequest(tuple(ids[start : start + length]), sampling, record_experts=True))
    return requests


def trained_model(recipe: Recipe, scratch: Path) -> Path:
    """The Hub directory that the recipe's run leaves."""
    return train(recipe, scratch / "run", resume=False, console=Console(stderr=True)).model_directory


def agreement_of(directory: Path, *, sequences: int, longest_prompt: int = 220, longest_answer: int = 160) -> Agreement:
    """Measured on a Hub directory, in fp32, with engine and trainer loaded apart."""
    settings = EngineSettings(max_sequences=24, max_length=longest_prompt + longest_answer, prefill_tokens=256)
    engine = Engine(load_model(directory), settings)
    requests = requests_from_text(load_tokenizer(directory), sequences, longest_prompt, longest_answer)
    return measure_agreement(engine, load_model(directory), requests)


def run(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    recipe = load_recipe("k3-tiny-stdlib")
    if quick:
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": 30})})
    with tempfile.TemporaryDirectory() as scratch:
        result = agreement_of(trained_model(recipe, Path(scratch)), sequences=32 if quick else 256)
    shape = f"k3-tiny, {recipe.run.steps} steps"

    def figure(name: str, value: float, unit: str, goal: float, runs: int) -> Figure:
        return Figure(name, value, unit, "lower", shape, goal, runs=runs)

    return [
        figure("engine_trainer_logprob_gap", float(result.before_flip.quantile(0.999)), "nats", GAP_GOAL, len(result.before_flip)),
        figure("replayed_logprob_gap", float(result.replayed.quantile(0.999)), "nats", GAP_GOAL, len(result.replayed)),
        figure("replayed_logprob_gap_max", float(result.replayed.max()), "nats", REPLAYED_MAX_GOAL, len(result.replayed)),
        figure("expert_flips_per_10k", result.flips_per_10k, "per 10,000", FLIPS_GOAL, result.decisions),
    ]
