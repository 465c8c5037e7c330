"""Which instruction set the native code uses: the best this process can run, or a lower one by the environment variable PERILUNE_ISA.

On x86-64 the levels are portable < avx2 (AVX2, FMA) < avx512 (F, BW, VL, DQ) < amx (AMX-TILE, AMX-BF16, tiles granted by the kernel);
on aarch64 they are portable < neon. Without the native library there is only portable.
"""

import ctypes
import logging
import os
from functools import cache
from typing import Literal, get_args

from perilune.errors import UserError
from perilune.native.library import load_library

Isa = Literal["portable", "avx2", "avx512", "amx", "neon"]

ISA_VARIABLE = "PERILUNE_ISA"

_BY_CODE: dict[int, Isa] = {0: "portable", 1: "avx2", 2: "avx512", 3: "amx", 16: "neon"}  # enum perilune_isa in csrc/cpu/perilune_cpu.h
_LADDERS: tuple[tuple[Isa, ...], ...] = (("portable", "avx2", "avx512", "amx"), ("portable", "neon"))

_logger = logging.getLogger(__name__)


@cache
def detected_isa() -> Isa:
    """The highest level that the processor, the operating system and the built library allow. Asking may claim the AMX tiles."""
    handle = load_library().handle
    if handle is None:
        return "portable"
    handle.perilune_cpu_isa.argtypes = []
    handle.perilune_cpu_isa.restype = ctypes.c_int32
    return _BY_CODE[int(handle.perilune_cpu_isa())]


def levels_up_to(isa: Isa) -> tuple[Isa, ...]:
    """`isa` and every level below it, lowest first: ("portable", "avx2") for "avx2"."""
    ladder = next(ladder for ladder in _LADDERS if isa in ladder)
    return ladder[: ladder.index(isa) + 1]


def choose_isa(wanted: str | None, detected: Isa) -> Isa:
    """The level to use when PERILUNE_ISA says `wanted` (None or "" = unset).

    Raises UserError for a word that is no level, and for a level that this machine does not have.
    """
    if not wanted:
        return detected
    offered = levels_up_to(detected)
    for isa in offered:
        if isa == wanted:
            return isa
    problem = "is not available here" if wanted in get_args(Isa) else "is no instruction set"
    raise UserError(f"{ISA_VARIABLE}={wanted} {problem}: choose one of {', '.join(offered)}, or leave it unset for {detected}.")


def selected_isa() -> Isa:
    """The level to use now: PERILUNE_ISA if set, else the detected one. Logs once when the native library is missing."""
    _report_missing_library()
    return choose_isa(os.environ.get(ISA_VARIABLE), detected_isa())


@cache
def _report_missing_library() -> None:
    reason = load_library().reason
    if reason is not None:
        _logger.warning("using portable code: %s", reason)
