"""Metrics as JSON lines: appended one by one, readable while the run goes on, whole after any kill.

A line exists once its line end is in the file. Steps never go back within a file, so what a resumed run must forget is one tail.
"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from perilune.errors import UserError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class MetricsLog:
    """Append metrics to `path`, creating it and its folder.

    An existing file is continued: a torn last line is cut off, and with `resume_step` also every line of a later step, so that a run
    resumed from that step repeats nothing. One writer at a time (rank 0).

    Raises UserError when the file cannot be written or holds anything but metrics.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size, self._last_step = _keep(path, resume_step)
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
        except OSError as error:
            raise self._cannot_write(error) from error

    def write(self, step: int, **values: Any) -> None:
        """Append `{"step": step, **values}`. Values are what JSON knows; NaN and infinities become null.

        The line has left this process when the call returns. If it cannot be written whole, the file stays as it was.
        Raises ValueError when `step` lies before the last line's, UserError when the disk is full.
        """
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step} in {self.path}: open the log with resume_step to go back")
        line = json.dumps(_finite({"step": step, **values}), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise self._cannot_write(error) from error
        self._size += written
        self._last_step = step

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _cannot_write(self, error: OSError) -> UserError:
        if error.errno in _DISK_FULL:
            return UserError(
                f"Cannot write metrics to {self.path}: the disk is full; free space and resume, everything written before is intact."
            )
        return UserError(f"Cannot write metrics to {self.path}: {error.strerror}; choose a run directory you can write to.")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records in order; a torn last line is left out. Raises UserError when there is no such file or it holds anything else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read metrics from {path}: {error.strerror}.") from error
    return [record for record, _ in _records(content, path)]


def _keep(path: Path, resume_step: int | None) -> tuple[int, int | None]:
    """Bytes to keep of the file, and the step of their last line."""
    size = 0
    last_step: int | None = None
    for record, end in _records(path.read_bytes(), path):
        if resume_step is not None and record["step"] > resume_step:
            break
        size, last_step = end, record["step"]
    return size, last_step


def _records(content: bytes, path: Path) -> list[tuple[dict[str, Any], int]]:
    """(record, end of its line in bytes) for every whole line."""
    records = []
    end = 0
    lines = content.split(b"\n")[:-1]  # what follows the last line end is torn, or empty
    for number, line in enumerate(lines, 1):
        end += len(line) + 1
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UserError(f"{path}:{number} is not a line of metrics: the file was damaged or written by something else; move it away.")
        records.append((record, end))
    return records


def _finite(value: Any) -> Any:
    """`value` with every float that JSON cannot spell replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
