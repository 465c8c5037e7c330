"""Loads the shared libraries that `setup.py` compiled from `csrc/`, and keeps the reason when one cannot be used.

A missing or stale library is not an error here: every fast path has a portable twin. `perilune doctor` shows the reason.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ABI_VERSION = 1
"""`PERILUNE_ABI_VERSION` of csrc/cpu/perilune_cpu.h; a library built for another one is refused."""

CPU_LIBRARY = "libperilune_cpu.so"

_BUILD = "run `make setup` (it needs a C compiler: apt-get install gcc libc6-dev)"


@dataclass(frozen=True)
class NativeLibrary:
    """One shared library: `handle` to call it, or `reason` (a sentence) why it cannot be called. Exactly one of them is set."""

    path: Path
    handle: ctypes.CDLL | None
    reason: str | None


def open_library(path: Path) -> NativeLibrary:
    """Loads the library at `path` and checks its ABI version. Never raises: what is wrong becomes the `reason`."""
    if not path.exists():
        return NativeLibrary(path, None, f"{path.name} is not built; {_BUILD}")
    try:
        handle = ctypes.CDLL(str(path))
        version = handle.perilune_abi_version
    except OSError as error:
        return NativeLibrary(path, None, f"{path.name} cannot be loaded ({error}); {_BUILD}")
    except AttributeError:
        return NativeLibrary(path, None, f"{path.name} has no perilune_abi_version; {_BUILD}")
    version.argtypes = []
    version.restype = ctypes.c_int32
    found = int(version())
    if found != ABI_VERSION:
        return NativeLibrary(path, None, f"{path.name} was built for ABI {found} and this version needs {ABI_VERSION}; {_BUILD}")
    return NativeLibrary(path, handle, None)


@cache
def load_library(filename: str = CPU_LIBRARY) -> NativeLibrary:
    """The library of that name beside this file, loaded once per process."""
    return open_library(Path(__file__).with_name(filename))
