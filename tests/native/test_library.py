"""Loading the native library, and every way in which it can be unusable."""

import subprocess
from pathlib import Path

import pytest

from perilune.native import library
from perilune.native.library import ABI_VERSION, load_library, open_library

needs_library = pytest.mark.skipif(load_library().handle is None, reason=f"native library: {load_library().reason}")


def compile_library(tmp_path: Path, source: str) -> Path:
    (tmp_path / "made.c").write_text(source)
    output = tmp_path / "libmade.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "made.c"), "-o", str(output)], check=True)
    return output


@needs_library
def test_the_built_library_has_the_abi_that_python_expects() -> None:
    loaded = load_library()
    assert loaded.reason is None
    assert loaded.handle is not None
    assert loaded.handle.perilune_abi_version() == ABI_VERSION


def test_the_abi_version_is_the_one_of_the_header() -> None:
    header = Path(__file__).parents[2] / "csrc" / "cpu" / "perilune_cpu.h"
    assert f"#define PERILUNE_ABI_VERSION {ABI_VERSION}\n" in header.read_text()


def test_a_library_is_loaded_once_per_process() -> None:
    assert load_library() is load_library()


def test_a_missing_library_is_a_reason_that_says_what_to_do(tmp_path: Path) -> None:
    missing = open_library(tmp_path / "libnone.so")
    assert missing.handle is None
    assert missing.reason is not None
    assert "not built" in missing.reason
    assert "make setup" in missing.reason


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "libtext.so"
    path.write_text("not an ELF file")
    broken = open_library(path)
    assert broken.handle is None
    assert "cannot be loaded" in str(broken.reason)


@needs_library
def test_a_library_of_another_abi_is_refused_and_names_both_versions(tmp_path: Path) -> None:
    stale = open_library(compile_library(tmp_path, "int perilune_abi_version(void) { return 999; }"))
    assert stale.handle is None
    assert "ABI 999" in str(stale.reason)
    assert f"needs {ABI_VERSION}" in str(stale.reason)


@needs_library
def test_a_library_without_an_abi_version_is_refused(tmp_path: Path) -> None:
    foreign = open_library(compile_library(tmp_path, "int something_else(void) { return 1; }"))
    assert foreign.handle is None
    assert "perilune_abi_version" in str(foreign.reason)


def test_every_reason_names_the_file(tmp_path: Path) -> None:
    assert "libother.so" in str(open_library(tmp_path / "libother.so").reason)
    assert library.CPU_LIBRARY == "libperilune_cpu.so"
