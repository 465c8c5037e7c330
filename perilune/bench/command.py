"""`perilune bench`: runs benchmarks, prints their tables and writes their reports."""

import os
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

import perilune
from perilune.bench import BENCHES, load_bench
from perilune.bench.machine import this_machine
from perilune.bench.report import Report, current_commit, make_report, report_table, reuse
from perilune.errors import UserError


def list_all() -> None:
    """Prints every benchmark's name and what it measures."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, bench in BENCHES.items():
        table.add_row(name, bench.description)
    Console().print(table)


def run_benches(name: str, *, quick: bool, json_path: str | None, earlier: Path | None) -> None:
    """Runs the benchmark called `name` (or "all"), prints a table of each and writes its report to `json_path`.

    `json_path` is a file, "-" for stdout (the tables then go to stderr), or with "all" a directory that gets NAME.json.
    `earlier` reprints a report of the same commit. Raises UserError for an unknown name and for a path that cannot be written,
    before anything is measured.
    """
    names = list(BENCHES) if name == "all" else [name]
    loaded = {each: load_bench(each) for each in names}
    outputs = {each: _output(each, json_path, in_directory=name == "all") for each in names}
    commit = current_commit(Path(perilune.__file__).parent)
    console = Console(stderr=json_path == "-")
    for each, run in loaded.items():
        if earlier is not None:
            report = reuse(earlier, each, commit)
        else:
            machine = this_machine()  # before the run: it holds the load before
            figures = run(quick)
            report = make_report(each, figures, version=perilune.__version__, commit=commit, date=datetime.now(UTC), machine=machine)
        _write(report, outputs[each])
        console.print(report_table(report))


def _output(name: str, json_path: str | None, *, in_directory: bool) -> Path | None:
    """The file that the report goes to, made sure of before minutes of measuring; Path("-") for stdout, None for nowhere."""
    if json_path is None or json_path == "-":
        return None if json_path is None else Path(json_path)
    path = Path(json_path, f"{name}.json") if in_directory else Path(json_path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The directory of {path} cannot be made ({error.strerror}): give --json another path.") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written: give --json a path of a file that can.")
    return path


def _write(report: Report, output: Path | None) -> None:
    if output == Path("-"):
        print(report.dumps(), end="")
    elif output is not None:
        output.write_text(report.dumps())
