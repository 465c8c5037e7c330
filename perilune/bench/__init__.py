"""One file per published figure. `perilune bench NAME` runs `perilune.bench.NAME.run(quick)`; timing and figures are in
`harness.py`, the form of a report in `report.py`, the machine line in `machine.py`.

To add a benchmark: write `perilune/bench/NAME.py` with `def run(quick: bool) -> list[Figure]` and enter it in `BENCHES`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perilune.errors import UserError

if TYPE_CHECKING:
    from perilune.bench.report import Figure


@dataclass(frozen=True)
class Bench:
    """Where a benchmark lives (a module with `run`) and what it measures, in one line."""

    module: str
    description: str


BENCHES: dict[str, Bench] = {
    "agreement": Bench("perilune.bench.agreement", "log-probabilities and experts of the engine against the trainer's, on a trained model"),
    "kda": Bench("perilune.bench.kda", "the KDA operator: portable forward and backward, tokens per second of one thread"),
}


def load_bench(name: str) -> "Callable[[bool], list[Figure]]":
    """The `run` function of the benchmark called `name`. Raises UserError for an unknown name."""
    bench = BENCHES.get(name)
    if bench is None:
        raise UserError(f"There is no benchmark {name!r}: choose one of {', '.join(sorted(BENCHES))}, or all.")
    run: Callable[[bool], list[Figure]] = importlib.import_module(bench.module).run
    return run
