"""Instruction-set detection against the kernel's own list, the decision over planted registers, and the PERILUNE_ISA override."""

import ctypes
import logging
import platform
from pathlib import Path

import pytest

from perilune.errors import UserError
from perilune.native import isa as isa_module
from perilune.native.isa import Isa, choose_isa, detected_isa, levels_up_to, selected_isa
from perilune.native.library import NativeLibrary, load_library

needs_library = pytest.mark.skipif(load_library().handle is None, reason=f"native library: {load_library().reason}")

AVX512_FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


class Registers(ctypes.Structure):
    """`struct perilune_cpu_registers`."""

    _fields_ = [
        ("leaf1_ecx", ctypes.c_uint32),
        ("leaf7_ebx", ctypes.c_uint32),
        ("leaf7_edx", ctypes.c_uint32),
        ("xcr0", ctypes.c_uint64),
        ("tiles_permitted", ctypes.c_uint32),
    ]


FMA, OSXSAVE = 1 << 12, 1 << 27
AVX2 = 1 << 5
AVX512 = 1 << 16 | 1 << 17 | 1 << 30 | 1 << 31
AMX = 1 << 22 | 1 << 24
SAVES_YMM, SAVES_ZMM, SAVES_TILES = 0x6, 0xE0, 0x60000


def level_of(registers: Registers) -> int:
    handle = load_library().handle
    assert handle is not None
    return int(handle.perilune_cpu_isa_of(ctypes.byref(registers)))


def kernel_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


@needs_library
@pytest.mark.skipif(platform.machine() != "x86_64" or not kernel_flags(), reason="compares with the x86-64 flags of /proc/cpuinfo")
def test_detection_agrees_with_the_kernels_list_of_flags() -> None:
    flags, offered = kernel_flags(), levels_up_to(detected_isa())
    assert ("avx2" in offered) == ({"avx2", "fma"} <= flags)
    assert ("avx512" in offered) == ({"avx2", "fma", *AVX512_FLAGS} <= flags)
    if "amx" in offered:  # the kernel lists the tiles even where it refuses them to this process
        assert {"amx_tile", "amx_bf16", *AVX512_FLAGS} <= flags


@needs_library
@pytest.mark.skipif(platform.machine() != "aarch64", reason="aarch64 only")
def test_aarch64_offers_neon() -> None:
    assert levels_up_to(detected_isa()) == ("portable", "neon")


@needs_library
@pytest.mark.parametrize(
    ("registers", "level"),
    [
        (Registers(0, 0, 0, 0, 0), 0),
        (Registers(FMA | OSXSAVE, AVX2, 0, SAVES_YMM, 0), 1),
        (Registers(FMA | OSXSAVE, AVX2 | AVX512, 0, SAVES_YMM | SAVES_ZMM, 0), 2),
        (Registers(FMA | OSXSAVE, AVX2 | AVX512, AMX, SAVES_YMM | SAVES_ZMM | SAVES_TILES, 1), 3),
    ],
)
def test_each_level_needs_its_processor_bits_and_saved_registers(registers: Registers, level: int) -> None:
    assert level_of(registers) == level


@needs_library
@pytest.mark.parametrize(
    ("claim", "registers", "level"),
    [
        ("AVX2 without FMA", Registers(OSXSAVE, AVX2, 0, SAVES_YMM, 0), 0),
        ("xgetbv not enabled", Registers(FMA, AVX2, 0, SAVES_YMM, 0), 0),
        ("YMM not saved", Registers(FMA | OSXSAVE, AVX2, 0, 0x2, 0), 0),
        ("one AVX-512 part missing", Registers(FMA | OSXSAVE, AVX2 | AVX512 & ~(1 << 17), 0, SAVES_YMM | SAVES_ZMM, 0), 1),
        ("ZMM not saved", Registers(FMA | OSXSAVE, AVX2 | AVX512, 0, SAVES_YMM | 0x60, 0), 1),
        ("tiles not saved", Registers(FMA | OSXSAVE, AVX2 | AVX512, AMX, SAVES_YMM | SAVES_ZMM, 1), 2),
        ("tiles not granted", Registers(FMA | OSXSAVE, AVX2 | AVX512, AMX, SAVES_YMM | SAVES_ZMM | SAVES_TILES, 0), 2),
        ("tiles without bfloat16", Registers(FMA | OSXSAVE, AVX2 | AVX512, 1 << 24, SAVES_YMM | SAVES_ZMM | SAVES_TILES, 1), 2),
        ("tiles without AVX-512", Registers(FMA | OSXSAVE, AVX2, AMX, SAVES_YMM | SAVES_ZMM | SAVES_TILES, 1), 1),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_level_that_would_fault_is_not_claimed(claim: str, registers: Registers, level: int) -> None:
    assert level_of(registers) == level, claim


@pytest.mark.parametrize("wanted", [None, ""])
def test_unset_means_the_detected_level(wanted: str | None) -> None:
    assert choose_isa(wanted, "avx512") == "avx512"


@pytest.mark.parametrize("wanted", ["portable", "avx2", "avx512"])
def test_a_lower_level_can_be_chosen(wanted: Isa) -> None:
    assert choose_isa(wanted, "avx512") == wanted


@pytest.mark.parametrize(
    ("wanted", "detected"), [("amx", "avx512"), ("neon", "avx2"), ("avx2", "neon"), ("sse9", "avx2"), ("AVX2", "avx2")]
)
def test_an_impossible_level_is_one_sentence_that_lists_what_there_is(wanted: str, detected: Isa) -> None:
    with pytest.raises(UserError) as caught:
        choose_isa(wanted, detected)
    message = str(caught.value)
    assert message.startswith(f"PERILUNE_ISA={wanted} is ")
    assert ", ".join(levels_up_to(detected)) in message
    assert "\n" not in message


def test_the_environment_variable_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERILUNE_ISA", "portable")
    assert selected_isa() == "portable"
    monkeypatch.delenv("PERILUNE_ISA")
    assert selected_isa() == detected_isa()


def test_a_missing_library_means_portable_and_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    absent = NativeLibrary(Path("libperilune_cpu.so"), None, "libperilune_cpu.so is not built")
    monkeypatch.setattr(isa_module, "load_library", lambda: absent)
    monkeypatch.delenv("PERILUNE_ISA", raising=False)
    isa_module.detected_isa.cache_clear()
    isa_module._report_missing_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert selected_isa() == "portable"
            assert selected_isa() == "portable"
        assert [record.getMessage() for record in caplog.records] == ["using portable code: libperilune_cpu.so is not built"]
    finally:
        isa_module.detected_isa.cache_clear()
        isa_module._report_missing_library.cache_clear()
