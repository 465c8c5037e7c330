"""The metrics file survives kills, full disks and resumption."""

import json
import math
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import UserError
from perilune.train.metrics_log import MetricsLog, read_metrics


def write_steps(path: Path, steps: list[int]) -> None:
    with MetricsLog(path) as log:
        for step in steps:
            log.write(step, loss=step / 2)


def test_lines_can_be_read_while_the_log_is_open(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "runs" / "a" / "metrics.jsonl")
    log.write(1, loss=2.5, stage="pretrain", loads=[1, 2])
    assert read_metrics(log.path) == [{"step": 1, "loss": 2.5, "stage": "pretrain", "loads": [1, 2]}]
    log.close()
    log.close()


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    write_steps(path, [2, 3])
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 2, 3]


def test_a_resumed_run_has_no_line_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [0, 1, 2, 2, 3, 4])
    with MetricsLog(path, resume_step=2) as log:
        assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 2]
        log.write(3, loss=7.0)
    assert read_metrics(path)[-1] == {"step": 3, "loss": 7.0}
    MetricsLog(path, resume_step=-1).close()
    assert path.read_bytes() == b""


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.text(max_size=5))
def test_a_file_cut_anywhere_reopens_with_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int, note: str) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(3):
            log.write(step, note=note)
    content = path.read_bytes()
    kept = content[: cut % (len(content) + 1)]
    path.write_bytes(kept)
    whole = kept.count(b"\n")
    assert [record["step"] for record in read_metrics(path)] == list(range(whole))
    with MetricsLog(path) as log:
        log.write(9)
    assert [record["step"] for record in read_metrics(path)] == [*range(whole), 9]


def test_zeros_left_by_a_power_cut_are_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1])
    with path.open("ab") as file:
        file.write(b"\0" * 100)
    write_steps(path, [2])
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_numbers_json_cannot_spell_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, loss=math.nan, deep={"norms": (math.inf, 1.0)})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "deep": {"norms": [None, 1.0]}}


def test_a_step_back_without_resuming_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [5])
    with MetricsLog(path) as log, pytest.raises(ValueError, match="step 4 comes after step 5"):
        log.write(4)


def test_a_full_disk_loses_nothing_written_before_and_the_log_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsLog(path) as log:
        log.write(1, loss=1.0)
        before = path.read_bytes()
        # The kernel takes the first 10 bytes of the next line and refuses the rest, as a disk that fills up does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            with pytest.raises(UserError, match=r"metrics\.jsonl: the disk is full"):
                log.write(2, loss=2.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        log.write(2, loss=2.0)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", [b"hello", b"[]", b'{"loss": 1}', b'{"step": true}', b'{"step": 1.5}', b"\xff"])
def test_a_file_that_holds_something_else_is_not_touched(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + line + b"\n"
    path.write_bytes(content)
    for use in (read_metrics, MetricsLog):
        with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a line of metrics"):
            use(path)
    assert path.read_bytes() == content


def test_places_that_cannot_be_read_or_written_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot read"):
        read_metrics(tmp_path / "nowhere.jsonl")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "metrics.jsonl", tmp_path):
        with pytest.raises(UserError, match="Cannot write metrics"):
            MetricsLog(path)
