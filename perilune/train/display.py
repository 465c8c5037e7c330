"""What a training run shows: a live line while it goes on, a table when it is done."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@dataclass(frozen=True)
class TrainResult:
    """Where the model is and how good it became, in bits per byte of held-out text."""

    model_directory: Path
    bits_per_byte: float
    untrained_bits_per_byte: float
    unigram_bits_per_byte: float


class LiveProgress:
    """The live line: step, loss, held-out bits per byte, tokens per second, time left."""

    def __init__(self, console: Console, done: int, steps: int, visible: bool) -> None:
        columns = ("train", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not visible)
        self._task = self._bar.add_task("train", total=steps, completed=done, note="")
        self._score = ""

    def __enter__(self) -> "LiveProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, loss: float, speed: float, score: float | None) -> None:
        if score is not None:
            self._score = f"held out {score:.3f} bits/byte  "
        self._bar.update(self._task, advance=1, note=f"loss {loss:.3f}  {self._score}{speed:,.0f} tokens/s")


def summary(result: TrainResult) -> Table:
    table = Table(title="held-out text")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    for name, value in (
        ("trained", result.bits_per_byte),
        ("unigram", result.unigram_bits_per_byte),
        ("untrained", result.untrained_bits_per_byte),
    ):
        table.add_row(name, f"{value:.3f}")
    table.caption = f"saved in {result.model_directory}"
    return table
