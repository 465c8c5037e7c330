"""Checkpoints: everything that a run needs to continue with the identical next loss, in one file each.

A file is written aside, synced and renamed, so the newest complete one survives a kill or a full disk at any moment. Loading
falls back to an older file when the newest is damaged, and says so.
"""

import contextlib
import logging
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.errors import UserError

logger = logging.getLogger(__name__)

_PATTERN = "step-*.pt"


@dataclass(frozen=True)
class Checkpoint:
    """State after `step` optimizer steps. `content` holds tensors and plain data only (it loads with `weights_only`)."""

    step: int
    content: dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one run, newest `keep` of them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def files(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self.folder.glob(_PATTERN))

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write one and drop the oldest beyond `keep`. Raises UserError when it cannot be written; older ones stay then.

        Files of later steps stay: they are damaged ones that the run was resumed behind, and count as none of the `keep`.
        """
        path = self.folder / f"step-{checkpoint.step:08d}.pt"
        aside = self.folder / f".{path.name}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                torch.save({"step": checkpoint.step, "content": checkpoint.content}, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
            _sync_folder(self.folder)
        except BaseException as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            # torch hides what stopped a write, be it Ctrl-C, behind a RuntimeError of its own.
            reason = error.__context__ if isinstance(error, RuntimeError) and error.__context__ is not None else error
            if not isinstance(reason, OSError | RuntimeError):
                raise reason from None
            detail = (isinstance(reason, OSError) and reason.strerror) or reason
            kept = [file for file in self.files() if file < path]
            last = f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier one"
            raise UserError(f"cannot write the checkpoint {path} ({detail}): free space on that disk and resume; {last}") from None
        for old in [file for file in self.files() if file <= path][: -self._keep]:
            old.unlink(missing_ok=True)
        return path

    def latest(self) -> Checkpoint | None:
        """The newest readable checkpoint, or None without any. Raises UserError when there are some and none can be read."""
        files = self.files()
        for path in reversed(files):
            try:
                with zipfile.ZipFile(path) as archive:  # torch stores checksums and does not compare them
                    if (part := archive.testzip()) is not None:
                        raise ValueError(f"{part} does not match its checksum")
                data = torch.load(path, map_location="cpu", weights_only=True)
                return Checkpoint(int(data["step"]), data["content"])
            except Exception as error:  # a damaged archive or pickle can raise almost anything
                logger.warning("%s is damaged (%s): falling back to an earlier checkpoint", path, error)
        if files:
            raise UserError(f"none of the {len(files)} checkpoints in {self.folder} can be read: restore one, or start a new run")
        return None


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
