"""The list-driven build of setup.py: shared libraries of several instruction sets, static programs, cross and missing compilers."""

import ctypes
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (apt-get install gcc libc6-dev)")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module: nothing runs on import."""
    for variable in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(variable, raising=False)
    spec = importlib.util.spec_from_file_location("perilune_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "perilune_setup", module)
    spec.loader.exec_module(module)
    return module


def planted(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@needs_compiler
def test_one_library_holds_sources_compiled_for_different_instruction_sets(build: ModuleType, tmp_path: Path) -> None:
    visible = '__attribute__((visibility("default")))'
    portable = planted(tmp_path, "portable.c", f"{visible} int base(void) {{\n#ifdef __AVX2__\nreturn 2;\n#else\nreturn 1;\n#endif\n}}\n")
    fast = planted(tmp_path, "fast.c", f"{visible} int fast(void) {{\n#ifdef __AVX2__\nreturn 2;\n#else\nreturn 1;\n#endif\n}}\n")
    target = build.NativeTarget(
        "libtwo.so", sources=(build.Source(portable), build.Source(fast, flags=("-mavx2", "-mfma"), machines=("x86_64",)))
    )
    library = ctypes.CDLL(str(build.build_target(target, build.find_toolchain(), tmp_path / "out")))
    assert library.base() == 1
    if platform.machine() == "x86_64":
        assert library.fast() == 2
    else:
        assert not hasattr(library, "fast")


@needs_compiler
def test_a_sources_own_flags_win_over_the_users(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", "-DLEVEL=1 -DUSER=7")
    source = planted(tmp_path, "level.c", '__attribute__((visibility("default"))) int level(void) { return LEVEL * 10 + USER; }\n')
    target = build.NativeTarget("liblevel.so", sources=(build.Source(source, flags=("-ULEVEL", "-DLEVEL=2")),))
    assert ctypes.CDLL(str(build.build_target(target, build.find_toolchain(), tmp_path))).level() == 27


@needs_compiler
def test_a_target_can_be_a_static_program(build: ModuleType, tmp_path: Path) -> None:
    source = planted(tmp_path, "agent.c", '#include <stdio.h>\nint main(void) { puts("ready"); return 0; }\n')
    program = build.build_target(
        build.NativeTarget("agent", sources=(build.Source(source),), executable=True), build.find_toolchain(), tmp_path
    )
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "ready\n"
    headers = subprocess.run(["readelf", "-l", program], capture_output=True, text=True, check=True).stdout
    assert "INTERP" not in headers


@needs_compiler
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (apt-get install g++)")
def test_c_and_cplusplus_sources_link_into_one_library(build: ModuleType, tmp_path: Path) -> None:
    plus = planted(tmp_path, "plus.cpp", '#include <vector>\nextern "C" int three(void) { return (int)std::vector<int>(3).size(); }\n')
    plain = planted(tmp_path, "plain.c", 'int three(void);\n__attribute__((visibility("default"))) int six(void) { return 2 * three(); }\n')
    target = build.NativeTarget("libmixed.so", sources=(build.Source(plus), build.Source(plain)))
    assert ctypes.CDLL(str(build.build_target(target, build.find_toolchain(), tmp_path))).six() == 6


@needs_compiler
def test_a_rebuild_replaces_the_file_and_never_writes_into_a_mapped_one(build: ModuleType, tmp_path: Path) -> None:
    source = planted(tmp_path, "one.c", "int one(void) { return 1; }\n")
    target = build.NativeTarget("libone.so", sources=(build.Source(source),))
    first = build.build_target(target, build.find_toolchain(), tmp_path).stat().st_ino
    with (tmp_path / "libone.so").open("rb"):  # held open, so its inode number cannot be given to the new file
        assert build.build_target(target, build.find_toolchain(), tmp_path).stat().st_ino != first


@needs_compiler
def test_a_fault_in_our_source_stops_the_build_and_shows_the_compilers_words(build: ModuleType, tmp_path: Path) -> None:
    source = planted(tmp_path, "broken.c", "int broken(void) { return missing_name; }\n")
    with pytest.raises(build.CompileFailed, match="missing_name"):
        build.build_target(build.NativeTarget("libbroken.so", sources=(build.Source(source),)), build.find_toolchain(), tmp_path)


def test_without_a_compiler_the_reason_names_the_package(build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.CompilerMissing, match="apt-get install gcc libc6-dev"):
        build.find_toolchain()


@needs_compiler
def test_a_compiler_that_cannot_link_counts_as_missing_and_is_quoted(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "brokencc"
    fake.write_text("#!/bin/sh\necho 'stdlib.h: No such file or directory' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(build.CompilerMissing, match=r"stdlib\.h: No such file.*libc6-dev"):
        build.find_toolchain()


def test_a_cross_c_compiler_brings_its_own_cplusplus_compiler(build: ModuleType) -> None:
    assert build._cxx_candidates(("aarch64-linux-gnu-gcc",))[0] == "aarch64-linux-gnu-g++"
    assert build._cxx_candidates(("ccache", "gcc-13"))[0] == "g++-13"
    assert build._cxx_candidates(("/opt/llvm/bin/clang",))[0] == "/opt/llvm/bin/clang++"


@needs_compiler
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="no cross compiler (apt-get install gcc-aarch64-linux-gnu)")
def test_the_listed_libraries_cross_compile_for_aarch64(build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "aarch64-linux-gnu-gcc")
    toolchain = build.find_toolchain()
    assert toolchain.machine == "aarch64"
    for target in build.NATIVE_TARGETS:
        header = build.build_target(target, toolchain, tmp_path).read_bytes()[:20]
        assert header[18] == 183  # EM_AARCH64


def test_every_listed_source_exists(build: ModuleType) -> None:
    sources = [source for target in build.NATIVE_TARGETS for source in target.sources]
    assert sources
    assert all((ROOT / source.path).is_file() for source in sources)
