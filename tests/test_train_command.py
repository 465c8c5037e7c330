"""`perilune train` as a user meets it: started, stopped, killed, resumed and refused from outside."""

import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from perilune import cli
from perilune.model.hub import load_model
from perilune.model.tokenizer import BpeTokenizer, load_tokenizer
from tests.train.tiny_runs import comparable_metrics, write_config, write_corpus

STEPS = 20
DEADLINE = 90.0


def recipe_text(place: Path, **changes: str) -> str:
    """A tiny recipe; `changes` replaces the text of a table or adds one."""
    tables = {
        "model": f'config = "{place / "config.json"}"',
        "tokenizer": 'kind = "bpe"\nvocab_size = 300',
        "corpus": f'source = "directory"\npath = "{place / "corpus"}"\nheld_out_fraction = 0.2',
        "optimizer": "learning_rate = 1e-2",
        "run": f"steps = {STEPS}\ntokens_per_batch = 64\nmax_length = 32\neval_every = 5\neval_tokens = 64\ncheckpoint_every = 2",
    }
    return "".join(f"[{name}]\n{text}\n" for name, text in (tables | changes).items())


@dataclass(frozen=True)
class Run:
    """A finished run: where its files are and what the command printed."""

    place: Path
    recipe: Path
    out: Path
    printed: str


def command(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.Popen([sys.executable, "-m", "perilune", *arguments], stderr=subprocess.PIPE, text=True, env=environment)


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The command in this process, for its exit status; what it prints goes to capsys."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["perilune", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence with which a command ends with status 2: the last line on stderr, after whatever it said of its progress."""
    assert run_here(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    *progress, sentence = printed.err.splitlines()
    assert printed.out == "" and sentence.startswith("perilune: ")
    assert not [line for line in progress if "Traceback" in line or line.startswith("perilune: ")]
    return sentence


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("train")
    write_config(place / "config.json")
    write_corpus(place / "corpus")
    recipe = place / "tiny.toml"
    recipe.write_text(recipe_text(place))
    process = command("train", str(recipe), "--out", str(place / "run"))
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    return Run(place, recipe, place / "run", errors)


def test_a_run_leaves_everything_that_others_need(finished: Run) -> None:
    assert {path.name for path in finished.out.iterdir()} == {"recipe.json", "tokenizer", "checkpoints", "metrics.jsonl", "model"}
    lines = comparable_metrics(finished.out)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert lines[0].keys() == {"step", "held_out_bits_per_byte", "unigram_bits_per_byte"}
    assert [line["step"] for line in lines if "held_out_bits_per_byte" in line] == [0, 5, 10, 15, STEPS]
    assert lines[-1]["loss"] < lines[1]["loss"]
    assert sorted(path.name for path in (finished.out / "checkpoints").iterdir()) == ["step-00000018.pt", "step-00000020.pt"]
    model, tokenizer = load_model(finished.out / "model"), load_tokenizer(finished.out / "model")
    assert isinstance(tokenizer, BpeTokenizer) and tokenizer.vocab_size <= model.config.vocab_size == 300
    assert tokenizer.encode_text("The lazy dogs") == load_tokenizer(finished.out / "tokenizer").encode_text("The lazy dogs")


def test_a_run_prints_its_result_beside_both_baselines(finished: Run) -> None:
    first, last = comparable_metrics(finished.out)[0], comparable_metrics(finished.out)[-1]
    for name, value in (
        ("trained", last["held_out_bits_per_byte"]),
        ("unigram", first["unigram_bits_per_byte"]),
        ("untrained", first["held_out_bits_per_byte"]),
    ):
        (row,) = [line for line in finished.printed.splitlines() if f" {name} " in line and "bits" not in line]
        assert f"{value:.3f}" in row
    assert "12 documents" in finished.printed


def test_a_second_start_is_refused(finished: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(monkeypatch, capsys, "train", str(finished.recipe), "--out", str(finished.out))
    assert "already holds a run: add --resume" in message


def copied(finished: Run, place: Path) -> Path:
    return Path(shutil.copytree(finished.out, place / "run"))


def test_resuming_a_finished_run_only_saves_its_model_again(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copied(finished, tmp_path)
    before = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (out / "model" / "model.safetensors").unlink()
    assert run_here(monkeypatch, "train", str(finished.recipe), "--out", str(out), "--resume") == 0
    assert f"resumed after step {STEPS}" in capsys.readouterr().err
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def await_lines(out: Path, lines: int, running: Callable[[], bool]) -> None:
    """Return as soon as metrics.jsonl has that many lines."""
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + DEADLINE
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline and running(), "the run ended before it could be stopped"
        time.sleep(0.002)


def interrupt(finished: Run, out: Path, lines: int) -> None:
    """Start a run and press Ctrl-C after that many lines of metrics."""
    process = command("train", str(finished.recipe), "--out", str(out))
    try:
        await_lines(out, lines, lambda: process.poll() is None)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in errors
    assert re.search(r"stopped at step \d+; add --resume to go on from \S*step-\d+\.pt", errors.replace("\n", ""))


def kill(finished: Run, out: Path, lines: int) -> None:
    """Resume the run and kill it when metrics.jsonl has that many lines. Forked: another interpreter would cost seconds."""
    arguments = ["perilune", "train", str(finished.recipe), "--out", str(out), "--resume"]

    def resume() -> None:
        sys.argv = arguments
        cli.main()

    child = multiprocessing.get_context("fork").Process(target=resume)
    child.start()
    try:
        await_lines(out, lines, child.is_alive)
    finally:
        child.kill()
        child.join(DEADLINE)
    assert child.exitcode == -signal.SIGKILL


def test_a_run_that_is_interrupted_and_then_killed_comes_to_the_same_metrics(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where exactly it is hit is left to the machine; all that is asked is that it does not matter.
    moments = random.Random(os.urandom(8))
    out = tmp_path / "run"
    interrupt(finished, out, moments.randint(1, 4))
    last = comparable_metrics(out)[-1]["step"]
    kill(finished, out, min(last + moments.randint(2, 4), STEPS - 2))
    assert run_here(monkeypatch, "train", str(finished.recipe), "--out", str(out), "--resume") == 0
    assert "resumed after step" in capsys.readouterr().err
    assert comparable_metrics(out) == comparable_metrics(finished.out)
    weights = "model/model.safetensors"
    assert (out / weights).read_bytes() == (finished.out / weights).read_bytes()


def test_resuming_with_another_optimizer_is_refused(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "other.toml"
    recipe.write_text(recipe_text(finished.place, optimizer="learning_rate = 2e-2"))
    message = refused(monkeypatch, capsys, "train", str(recipe), "--out", str(finished.out), "--resume")
    assert "made with another [optimizer]" in message


def test_more_steps_continue_a_finished_run(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, recipe = copied(finished, tmp_path), tmp_path / "longer.toml"
    recipe.write_text(finished.recipe.read_text().replace(f"steps = {STEPS}", f"steps = {STEPS + 2}"))
    assert run_here(monkeypatch, "train", str(recipe), "--out", str(out), "--resume") == 0
    assert f"{STEPS} steps became {STEPS + 2}" in capsys.readouterr().err
    assert comparable_metrics(out)[: STEPS + 1] == comparable_metrics(finished.out)
    assert comparable_metrics(out)[-1]["step"] == STEPS + 2


def test_mistakes_are_one_sentence_and_status_2(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(out: Path = tmp_path / "run", *options: str, **changes: str) -> str:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(recipe_text(finished.place, **changes))
        return refused(monkeypatch, capsys, "train", str(recipe), "--out", str(out), *options)

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    damaged = copied(finished, tmp_path / "damaged")
    (damaged / "recipe.json").write_text('{"run": ')
    write_corpus(tmp_path / "one", count=1)
    assert "holds no run to resume" in refusal(tmp_path / "nowhere", "--resume")
    assert "No usable text" in refusal(corpus=f'source = "directory"\npath = "{tmp_path / "empty"}"')
    assert "single document (0.txt)" in refusal(corpus=f'source = "directory"\npath = "{tmp_path / "one"}"')
    assert "cannot write to" in refusal(tmp_path / "file" / "run")
    assert "recipe.json is damaged" in refusal(damaged, "--resume")
    assert "unknown model 'k4'" in refusal(model='preset = "k4"')
    assert "optimizer.colour" in refusal(optimizer="colour = 1")
    assert "but the model only 100" in refusal(model=f'config = "{write_config(tmp_path / "small.json", vocab_size=100)}"')


def test_an_unknown_recipe_lists_those_there_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "k3-tiny-stdlib" in refused(monkeypatch, capsys, "train", "k4-huge")
