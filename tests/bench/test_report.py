"""The published form of a benchmark run, and its registry."""

import dataclasses
import importlib.util
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from perilune.bench import BENCHES, load_bench
from perilune.bench.machine import Machine, load_before, memory_bytes, processor_name, this_machine
from perilune.bench.report import Figure, Report, current_commit, make_report, read_report, report_table, reuse
from perilune.errors import UserError

MACHINE = Machine(cpu="A Processor", isa="avx2", cores=2, memory_gb=24, gpu=None, torch="2.13.0", load_before=0.4)
FIGURE = Figure(
    name="fwd_over_portable",
    value=14.2,
    unit="ratio",
    better="higher",
    shape="B1 T2048 H8 K128 V128",
    goal=12.0,
    ours=0.0101,
    baseline="portable torch chunkwise, best chunk",
    baseline_value=0.143,
    spread=(13.6, 14.9),
    runs=30,
    best_deciles=14.0,
)


def report(*figures: Figure, machine: Machine = MACHINE) -> Report:
    date = datetime(2026, 8, 1, 12, 0, tzinfo=UTC)
    return make_report("kda", figures, version="0.1.0", commit="abc", date=date, machine=machine)


def rendered(shown: Report) -> str:
    console = Console(width=200, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(report_table(shown))
    return console.export_text()


def test_the_json_has_the_published_keys_in_their_order() -> None:
    data = json.loads(report(FIGURE).dumps())
    assert list(data) == ["bench", "version", "commit", "date", "machine", "figures"]
    assert list(data["machine"]) == ["cpu", "isa", "cores", "memory_gb", "gpu", "torch", "load_before"]
    published = ["name", "shape", "value", "unit", "goal", "better", "ours", "baseline", "baseline_value", "spread", "runs", "best_deciles"]
    assert list(data["figures"][0]) == published
    assert data["date"] == "2026-08-01T12:00:00+00:00"


def test_a_report_survives_its_json(tmp_path: Path) -> None:
    path = tmp_path / "kda.json"
    path.write_text(report(FIGURE, Figure("count", 3.0, "copies", "lower")).dumps())
    assert read_report(path) == report(FIGURE, Figure("count", 3.0, "copies", "lower"))


@pytest.mark.parametrize(
    ("needs", "isa", "gpu", "held"),
    [
        (None, "portable", None, True),
        ("avx2", "avx2", None, True),
        ("avx2", "amx", None, True),
        ("amx", "avx512", None, False),
        ("neon", "avx2", None, False),
        ("cuda", "avx2", None, False),
        ("cuda", "avx2", "A GPU", True),
    ],
)
def test_a_goal_holds_only_where_the_machine_has_what_it_needs(needs: str | None, isa: str, gpu: str | None, held: bool) -> None:
    machine = dataclasses.replace(MACHINE, isa=isa, gpu=gpu)  # type: ignore[arg-type]
    figure = report(dataclasses.replace(FIGURE, needs=needs), machine=machine).figures[0]  # type: ignore[arg-type]
    assert figure.goal == (12.0 if held else None)
    assert figure.verdict() == ("met" if held else "")


@pytest.mark.parametrize(
    ("better", "value", "verdict"),
    [("higher", 12.0, "met"), ("higher", 11.99, "missed"), ("lower", 12.0, "met"), ("lower", 12.01, "missed")],
)
def test_a_goal_is_met_at_its_own_number_and_missed_beyond_it(better: str, value: float, verdict: str) -> None:
    assert dataclasses.replace(FIGURE, better=better, value=value).verdict() == verdict  # type: ignore[arg-type]


def test_the_table_says_missed_in_words_and_repeats_the_goal() -> None:
    text = rendered(report(dataclasses.replace(FIGURE, value=7.5)))
    assert "≥ 12 missed" in text
    assert "7.5 ratio" in text


def test_the_table_shows_what_could_not_be_measured() -> None:
    text = rendered(report(Figure("speedup", "not measurable", "ratio", "higher", goal=1.8)))
    assert "not measurable" in text
    assert "≥ 1.8" in text


def test_an_earlier_run_is_marked_in_every_figure(tmp_path: Path) -> None:
    (tmp_path / "kda.json").write_text(report(FIGURE, FIGURE).dumps())
    for path in (tmp_path, tmp_path / "kda.json"):
        again = reuse(path, "kda", "abc")
        assert [figure.reused for figure in again.figures] == [True, True]
        assert json.loads(again.dumps())["figures"][0]["reused"] is True
    assert "(reused)" in rendered(again)


def test_a_run_of_another_commit_or_bench_is_not_passed_off_as_this_one(tmp_path: Path) -> None:
    path = tmp_path / "kda.json"
    path.write_text(report(FIGURE).dumps())
    with pytest.raises(UserError, match="at commit abc, not kda at def"):
        reuse(path, "kda", "def")
    with pytest.raises(UserError, match="not sandbox at abc"):
        reuse(path, "sandbox", "abc")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"bench": "kda", "figures": []}', '{"figures": [{"name": 1}]}'])
def test_a_file_that_is_no_report_is_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(UserError, match="no benchmark report"):
        read_report(path)


def test_outside_a_checkout_the_commit_is_unknown(tmp_path: Path) -> None:
    assert current_commit(tmp_path) == "unknown"


def test_every_registered_bench_is_a_module_of_the_package_with_a_description() -> None:
    for name, bench in BENCHES.items():
        assert bench.module == f"perilune.bench.{name}"
        assert bench.description
        assert importlib.util.find_spec(bench.module) is not None


def test_an_unknown_bench_is_a_sentence_that_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="kda"):
        load_bench("kds")


def test_the_machine_line_describes_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERILUNE_ISA", raising=False)
    this_machine.cache_clear()
    machine = this_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.load_before == round(load_before(), 2)
    this_machine.cache_clear()


def test_the_processors_name_falls_back_to_the_architecture() -> None:
    assert processor_name("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n") == "Some CPU @ 2 GHz"
    assert processor_name("processor\t: 0\nCPU part\t: 0xd0c\n")


def test_memory_is_read_in_bytes() -> None:
    assert memory_bytes("MemTotal:       1024 kB\nMemAvailable:    512 kB\n") == 2**20
    assert memory_bytes("MemTotal: 1 kB\n", "Other") == 0
