"""The ranks of a job: one alone, and two that torchrun starts.

One job of two ranks serves all tests: it trains six steps, and its last checkpoint cannot be written.
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.train.checkpoint import CheckpointFolder
from perilune.train.packing import PackedDataset
from perilune.train.parallel import Ranks, joined_ranks
from perilune.train.recipe import recipe_from_data
from perilune.train.sources import prepare
from tests.train.tiny_runs import comparable_metrics, recipe_tables, start

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "perilune", "train")


def as_toml(tables: dict[str, Any]) -> str:
    """Tables of plain values, which TOML spells as JSON does."""
    lines = []
    for table, fields in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in fields.items())]
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class Job:
    """Two ranks' recipe, the directory they left and how they ended; and a single rank's directory that took both ranks' batches."""

    tables: dict[str, Any]
    out: Path
    status: int
    errors: str
    alone: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    place = tmp_path_factory.mktemp("two-ranks")
    tables = recipe_tables(place, steps=6, checkpoint_every=3)
    alone = place / "alone"
    start({**tables, "run": {**tables["run"], "micro_batches": 2}}, alone)

    # A run that was stopped before its first checkpoint, with a folder where the last one will be written aside: not even root can.
    out = place / "run"
    (out / "checkpoints" / ".step-00000006.pt.tmp").mkdir(parents=True)
    (out / "recipe.json").write_text(json.dumps(tables))
    (place / "recipe.toml").write_text(as_toml(tables))
    result = subprocess.run(
        [*TORCHRUN, str(place / "recipe.toml"), "--out", str(out), "--resume"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return Job(tables, out, result.returncode, result.stderr, alone)


def test_a_process_that_torchrun_did_not_start_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with joined_ranks() as ranks:
        assert ranks == Ranks(0, 1) and ranks.is_first
        assert ranks.sum(torch.tensor([2, 3])).tolist() == [2, 3]
        assert ranks.any(True) and not ranks.any(False)
        ranks.wait()
        assert not torch.distributed.is_initialized()


@pytest.mark.timeout(300)
def test_two_ranks_are_one_rank_with_both_batches(job: Job) -> None:
    together, alone = comparable_metrics(job.out), comparable_metrics(job.alone)
    assert [line["step"] for line in together] == [line["step"] for line in alone] == list(range(7)), job.errors
    for two, one in zip(together, alone, strict=True):
        assert two.keys() == one.keys()
        for name, value in one.items():
            assert two[name] == pytest.approx(value, rel=1e-4 if name == "gradient_norm" else 1e-5), f"step {one['step']}: {name}"


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(out / "checkpoints" / f"step-{step:08d}.pt", weights_only=True)["content"]["model"]
    return found


@pytest.mark.timeout(300)
def test_the_weights_and_biases_of_both_agree(job: Job) -> None:
    together, alone = weights(job.out, 3), weights(job.alone, 3)
    assert together.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.timeout(300)
def test_only_the_first_rank_speaks_and_writes(job: Job) -> None:
    assert job.errors.count("tokens to train on") == 1
    assert job.errors.count("cannot write the checkpoint") == 1
    assert sorted(path.name for path in job.out.iterdir()) == ["checkpoints", "metrics.jsonl", "recipe.json", "tokenizer"]
    assert [path.name for path in CheckpointFolder(job.out / "checkpoints", 9).files()] == ["step-00000000.pt", "step-00000003.pt"]


@pytest.mark.timeout(300)
def test_a_checkpoint_that_cannot_be_written_stops_both_ranks(job: Job) -> None:
    assert job.status != 0
    last_good = job.out / "checkpoints" / "step-00000003.pt"
    (sentence,) = [line for line in job.errors.splitlines() if line.startswith("perilune: cannot write")]
    assert sentence.endswith(f"free space on that disk and resume; the last good checkpoint is {last_good}")
    assert 'perilune/train/run.py", line' not in job.errors  # the only traceback is torchrun's own


@pytest.mark.timeout(300)
def test_a_checkpoint_of_two_ranks_resumes_on_one(job: Job) -> None:
    (job.out / "checkpoints" / ".step-00000006.pt.tmp").rmdir()
    _, printed = start(job.tables, job.out, resume=True)
    assert "resumed after step 3" in printed
    assert [line["step"] for line in comparable_metrics(job.out)] == list(range(7))
    # Three steps of two batches, then three of one: the cursor counts batches, whoever took them.
    recipe = recipe_from_data(job.tables, "recipe")
    data = PackedDataset(prepare(recipe, None).train, tokens_per_batch=64, max_length=32, cut=True, seed=0)
    for _ in range(3 * 2 + 3):
        data.next_batch()
    latest = CheckpointFolder(job.out / "checkpoints", 9).latest()
    assert latest is not None and latest.step == 6
    assert latest.content["data"] == dataclasses.asdict(data.state())
