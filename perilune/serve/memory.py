"""How much memory this process may still take."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# Limit and use, in version 2 and version 1 of Linux's control groups, as a container sees its own.
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes until swapping or, in a container, until its limit. Where Linux's estimate is not to be had: the whole memory."""
    free = [_available(meminfo)]
    for limit, use in _CGROUP_FILES:
        try:
            free.append(int((cgroup / limit).read_text()) - int((cgroup / use).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(0, min(free))


def _available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
