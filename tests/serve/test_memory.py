"""What is free is the least of what the machine and the container have."""

from pathlib import Path

from perilune.serve.memory import free_memory

MEMINFO = "MemTotal:       100 kB\nMemFree:         10 kB\nMemAvailable:    50 kB\n"


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_without_a_limit_it_is_what_the_machine_has_available(tmp_path):
    meminfo = written(tmp_path, meminfo=MEMINFO) / "meminfo"
    assert free_memory(meminfo, tmp_path / "none") == 50 * 1024
    assert free_memory(meminfo, written(tmp_path / "v2", memory_DOT_max="max\n", memory_DOT_current="5\n")) == 50 * 1024


def test_a_container_has_no_more_than_its_limit_leaves(tmp_path):
    meminfo = written(tmp_path, meminfo=MEMINFO) / "meminfo"
    second = written(tmp_path / "v2", memory_DOT_max="30000\n", memory_DOT_current="10000\n")
    assert free_memory(meminfo, second) == 20_000
    first = {"memory__memory_DOT_limit_in_bytes": "9000\n", "memory__memory_DOT_usage_in_bytes": "9500\n"}
    assert free_memory(meminfo, written(tmp_path / "v1", **first)) == 0


def test_without_linux_estimate_it_is_something(tmp_path):
    assert free_memory(tmp_path / "none", tmp_path) > 10**6
