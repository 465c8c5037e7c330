"""The machine line of a report: what the figures were measured on."""

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from perilune.native.isa import Isa, selected_isa


@dataclass(frozen=True)
class Machine:
    """`isa` is the level in use (PERILUNE_ISA included); `load_before` is the one-minute load average before the first measurement."""

    cpu: str
    isa: Isa
    cores: int
    memory_gb: int
    gpu: str | None
    torch: str
    load_before: float


def processor_name(cpuinfo: str) -> str:
    """The model name in the text of /proc/cpuinfo; aarch64 kernels give none, so the architecture stands in."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def memory_bytes(meminfo: str, field: str = "MemTotal") -> int:
    """A field of the text of /proc/meminfo in bytes, 0 when it is not there."""
    for line in meminfo.splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return 0


def usable_cores() -> int:
    """Cores this process may run on (its affinity, which containers restrict)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_text(path: Path) -> str:
    """The file's text, or "" when it cannot be read: /proc is not the same everywhere."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@cache
def load_before() -> float:
    """The one-minute load average at the first call: later it would count this process itself."""
    return os.getloadavg()[0]


@cache
def this_machine() -> Machine:
    """Describes the machine once per process; call it before measuring."""
    load = load_before()
    import torch

    return Machine(
        cpu=processor_name(read_text(Path("/proc/cpuinfo"))),
        isa=selected_isa(),
        cores=usable_cores(),
        memory_gb=round(memory_bytes(read_text(Path("/proc/meminfo"))) / 2**30),
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        torch=str(torch.__version__),
        load_before=round(load, 2),
    )
