"""Checkpoints: what survives which accident."""

import logging
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from perilune.errors import UserError
from perilune.train import checkpoint as module
from perilune.train.checkpoint import Checkpoint, CheckpointFolder


def content(step: int, size: int = 4096) -> dict[str, Any]:
    """16 KiB of weights that tell the step, and plain data as a trainer has it."""
    return {"model": {"weight": torch.full((size,), float(step))}, "optimizers": {"names": ["weight"], "betas": (0.9, 0.95)}, "none": None}


def save(folder: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        folder.save(Checkpoint(step, content(step)))


def names(folder: CheckpointFolder) -> list[str]:
    """Everything in the folder, hidden files too."""
    return sorted(path.name for path in folder.folder.iterdir())


def assert_whole(found: Checkpoint | None, step: int) -> None:
    assert found is not None and found.step == step
    expected = content(step)
    assert torch.equal(found.content["model"]["weight"], expected["model"]["weight"])
    assert {k: v for k, v in found.content.items() if k != "model"} == {k: v for k, v in expected.items() if k != "model"}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def test_without_any_there_is_none(folder: CheckpointFolder) -> None:
    assert folder.latest() is None and folder.files() == []


def test_the_newest_is_read_back_whole(folder: CheckpointFolder) -> None:
    save(folder, 9, 10)
    assert_whole(folder.latest(), 10)


def test_only_the_newest_are_kept(folder: CheckpointFolder) -> None:
    save(folder, 0, 5, 10, 15)
    assert names(folder) == ["step-00000010.pt", "step-00000015.pt"]
    save(CheckpointFolder(folder.folder, keep=1), 20)
    assert names(folder) == ["step-00000020.pt"]


def truncated(good: bytes) -> bytes:
    return good[: len(good) // 2]


def flipped(good: bytes) -> bytes:
    middle = len(good) // 2  # among the weights, where the file still opens
    return good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]


def another_object(good: bytes) -> bytes:
    return b"\x80\x02]q\x00."  # an empty list, pickled


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": truncated,
    "cut by a byte": lambda good: good[:-1],
    "empty": lambda good: b"",
    "garbage": lambda good: b"garbage " * 100,
    "zeros": lambda good: bytes(len(good)),
    "one bit": flipped,
    "another object": another_object,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_newest_falls_back_to_the_one_before_and_says_so(
    folder: CheckpointFolder, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    save(folder, 1, 2)
    newest = folder.files()[-1]
    newest.write_bytes(damage(newest.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert_whole(folder.latest(), 1)
    assert str(newest) in caplog.text and "falling back to an earlier checkpoint" in caplog.text


def test_when_all_are_damaged_the_user_is_told(folder: CheckpointFolder) -> None:
    save(folder, 1, 2)
    for path in folder.files():
        path.write_bytes(truncated(path.read_bytes()))
    with pytest.raises(UserError, match=r"none of the 2 checkpoints in .* can be read"):
        folder.latest()


def test_a_run_resumed_behind_a_damaged_file_keeps_what_it_saves_next(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 20)
    folder.files()[0].write_bytes(b"garbage")
    save(folder, 15)  # resumed from 10, with checkpoints at other steps
    assert_whole(folder.latest(), 15)
    save(folder, 20)
    assert_whole(folder.latest(), 20)
    assert names(folder) == ["step-00000020.pt"]


def interrupted_save(error: BaseException) -> Callable[[object, BinaryIO], None]:
    def torch_save(value: object, file: BinaryIO) -> None:
        file.write(b"the first half")
        raise error

    return torch_save


FAILURES = {
    "disk full": (OSError(28, "No space left on device"), "No space left on device"),
    "torch's own": (RuntimeError("unexpected pos 64 vs 0"), "unexpected pos"),
}


@pytest.mark.parametrize(("error", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_a_write_that_fails_leaves_the_earlier_one_and_nothing_else(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    save(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "save", interrupted_save(error))
        with pytest.raises(UserError, match="free space on that disk and resume") as caught:
            folder.save(Checkpoint(2, content(2)))
    assert reason in str(caught.value)
    assert f"the last good checkpoint is {folder.folder / 'step-00000001.pt'}" in str(caught.value)
    assert names(folder) == ["step-00000001.pt"]
    assert_whole(folder.latest(), 1)


def test_a_first_write_that_fails_says_that_there_is_no_earlier_one(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch, "save", interrupted_save(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="there is no earlier one"):
        folder.save(Checkpoint(0, content(0)))
    assert names(folder) == []


class FailingFile:
    """A file whose write number `at` fails; the rest goes to the real one."""

    def __init__(self, file: BinaryIO, at: int, error: BaseException) -> None:
        self.file, self.left, self.error = file, at, error

    def write(self, data: bytes) -> int:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


@pytest.mark.parametrize("at", range(1, 12, 2))
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"])
def test_what_stopped_torchs_writing_is_told_and_not_torchs_view_of_it(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException
) -> None:
    save(folder, 1)
    torch_save = torch.save
    monkeypatch.setattr(module.torch, "save", lambda value, file: torch_save(value, FailingFile(file, at, error)))
    with pytest.raises((UserError, KeyboardInterrupt)) as caught:
        folder.save(Checkpoint(2, content(2)))
    if isinstance(error, KeyboardInterrupt):
        assert caught.type is KeyboardInterrupt
    else:
        assert caught.type is UserError and "(No space left on device)" in str(caught.value)
    assert names(folder) == ["step-00000001.pt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_last_good_checkpoint(small_disk: Path) -> None:
    folder = CheckpointFolder(small_disk, keep=9)
    save(folder, 1, 2, 3)
    with pytest.raises(UserError, match=r"No space left on device.*step-00000003\.pt$") as caught:
        save(folder, 4)
    assert "\n" not in str(caught.value)
    assert names(folder) == [f"step-0000000{step}.pt" for step in (1, 2, 3)]
    assert_whole(folder.latest(), 3)


def kill_self(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(value: object, file: BinaryIO) -> None:
    file.write(b"the first half")
    file.flush()
    kill_self()


MOMENTS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "writing": (module.torch, "save", half_written),
    "syncing": (module.os, "fsync", kill_self),
    "renaming": (Path, "replace", kill_self),
    "after renaming": (module, "_sync_folder", kill_self),
    "dropping old ones": (Path, "unlink", kill_self),
}


def save_until_killed(folder: CheckpointFolder, owner: Any, name: str, killer: Callable[..., None]) -> None:
    setattr(owner, name, killer)
    save(folder, 3)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_leaves_only_whole_checkpoints(folder: CheckpointFolder, moment: str) -> None:
    save(folder, 1, 2)
    # Forked, so that no interpreter is started for each moment; what the child patches dies with it.
    child = multiprocessing.get_context("fork").Process(target=save_until_killed, args=(folder, *MOMENTS[moment]))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    for path in folder.files():
        assert_whole(CheckpointFolder(path.parent, 9).latest(), int(folder.files()[-1].stem.removeprefix("step-")))
        torch.load(path, weights_only=True)
    assert_whole(folder.latest(), 3 if moment in ("after renaming", "dropping old ones") else 2)
    save(folder, 3)
    assert_whole(folder.latest(), 3)
    assert names(folder) == ["step-00000002.pt", "step-00000003.pt"]
