"""What a benchmark run says: figures, the machine they were measured on, and one JSON form for all of them.

`goal` repeats the number that was promised and is never adjusted; a missed goal is shown as missed. A goal that needs an
instruction set or a device is null on a machine without it.
"""

import dataclasses
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from perilune.bench.machine import Machine
from perilune.errors import UserError
from perilune.native.isa import levels_up_to

NOT_MEASURABLE: Literal["not measurable"] = "not measurable"
NOT_INSTALLED = "not installed"

Need = Literal["avx2", "avx512", "amx", "neon", "cuda"]


@dataclass(frozen=True)
class Figure:
    """One number. Times (`ours`, `baseline_value` of a ratio) are seconds; `spread` is the 10th and 90th percentile of `value` over `runs`.

    `value` is "not measurable" when the machine was too busy for wall time, and None when the baseline is "not installed".
    `best_deciles` is the same figure from the fastest tenth of the runs. `needs` is what the goal needs of the machine.
    """

    name: str
    value: float | Literal["not measurable"] | None
    unit: str
    better: Literal["higher", "lower"]
    shape: str = ""
    goal: float | None = None
    ours: float | None = None
    baseline: str | None = None
    baseline_value: float | None = None
    spread: tuple[float, float] | None = None
    runs: int = 1
    best_deciles: float | None = None
    needs: Need | None = None
    reused: bool = False

    def verdict(self) -> str:
        """`met`, `missed`, `not measurable`, `not installed`, or "" where nothing was promised."""
        if self.value == NOT_MEASURABLE:
            return NOT_MEASURABLE
        if self.value is None:
            return NOT_INSTALLED if self.baseline == NOT_INSTALLED else ""
        if self.goal is None:
            return ""
        return "met" if (self.value >= self.goal if self.better == "higher" else self.value <= self.goal) else "missed"

    def to_json(self) -> dict[str, Any]:
        """The published form: six significant digits, and the rarer keys only where they say something."""
        names = ["name", "shape", "value", "unit", "goal", "better", "ours", "baseline", "baseline_value", "spread", "runs"]
        names += [name for name in ("best_deciles", "needs", "reused") if getattr(self, name)]
        return {name: _rounded(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Report:
    """One run of one benchmark. `date` is ISO 8601 in UTC; `commit` ends in `-dirty` when tracked files were changed."""

    bench: str
    version: str
    commit: str
    date: str
    machine: Machine
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "version": self.version,
            "commit": self.commit,
            "date": self.date,
            "machine": dataclasses.asdict(self.machine),
            "figures": [figure.to_json() for figure in self.figures],
        }

    def dumps(self) -> str:
        """The report as indented JSON text that ends in a newline."""
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"


def make_report(bench: str, figures: Iterable[Figure], *, version: str, commit: str, date: datetime, machine: Machine) -> Report:
    """Puts a run's figures in their published form: goals that this machine cannot be held to become null. `date` must be in UTC."""
    held = tuple(figure if _has(machine, figure.needs) else dataclasses.replace(figure, goal=None) for figure in figures)
    return Report(bench, version, commit, date.isoformat(timespec="seconds"), machine, held)


def read_report(path: Path) -> Report:
    """Reads what `Report.dumps` wrote. Raises UserError when the file is missing or is no such report."""
    try:
        data = json.loads(path.read_text())
        figures = [{**figure, "spread": tuple(figure["spread"]) if figure["spread"] else None} for figure in data["figures"]]
        return Report(**{**data, "machine": Machine(**data["machine"]), "figures": tuple(Figure(**figure) for figure in figures)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no benchmark report ({error}): give a file that `perilune bench NAME --json` wrote.") from error


def reuse(path: Path, bench: str, commit: str) -> Report:
    """An earlier report with every figure marked as reused; `path` is the file or a directory that holds `BENCH.json`.

    Raises UserError when it is of another benchmark or another commit.
    """
    report = read_report(path / f"{bench}.json" if path.is_dir() else path)
    if (report.bench, report.commit) != (bench, commit):
        raise UserError(
            f"{path} holds {report.bench} at commit {report.commit}, not {bench} at {commit}: run `perilune bench {bench}` anew."
        )
    return dataclasses.replace(report, figures=tuple(dataclasses.replace(figure, reused=True) for figure in report.figures))


def current_commit(directory: Path) -> str:
    """The commit checked out at `directory`, with `-dirty` for changed tracked files; "unknown" outside a git checkout."""
    try:
        head, status = (
            subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True, timeout=20).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}-dirty" if status else head


def report_table(report: Report) -> Table:
    """The report for people: one row a figure, a missed goal said in words."""
    machine = report.machine
    title = f"{report.bench}: {machine.cpu}, {machine.isa}, {machine.cores} cores, load before {machine.load_before:g}"
    table = Table(title=title, title_justify="left")
    for header in ("figure", "shape", "value", "spread", "goal", "ours", "baseline"):
        table.add_column(header, overflow="fold")
    styles = {"met": "green", "missed": "bold red", "": ""}
    for figure in report.figures:
        verdict = figure.verdict()
        sign = "≥" if figure.better == "higher" else "≤"
        goal = "" if figure.goal is None else f"{sign} {figure.goal:g}"
        baseline = figure.baseline or ""
        table.add_row(
            figure.name + (" (reused)" if figure.reused else ""),
            figure.shape,
            f"{_short(figure.value)} {figure.unit}" if isinstance(figure.value, int | float) else verdict,
            "" if figure.spread is None else " … ".join(_short(edge) for edge in figure.spread),
            f"{goal} {verdict}".strip(),
            _short(figure.ours),
            baseline if figure.baseline_value is None else f"{_short(figure.baseline_value)} {baseline}",
            style=styles.get(verdict, "yellow"),
        )
    return table


def _has(machine: Machine, need: Need | None) -> bool:
    if need is None:
        return True
    if need == "cuda":
        return machine.gpu is not None
    return any(need == level for level in levels_up_to(machine.isa))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [_rounded(item) for item in value] if isinstance(value, tuple) else value


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
