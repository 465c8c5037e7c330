"""Compiles the native code under `csrc/` into `perilune/native/`; everything else about the package is in pyproject.toml.

The results are plain C-ABI shared libraries and static executables: no Python and no torch headers, so one build serves every
Python and every torch, and the wheel is tagged `py3-none-PLATFORM`. To add one, add an entry to `NATIVE_TARGETS`.

Environment: `CC`, `CXX`, `CFLAGS`, `CXXFLAGS`, `LDFLAGS`; a cross compiler works (`CC=aarch64-linux-gnu-gcc`). Without a working
compiler the package installs all the same, says which Debian package is missing, and runs on its portable code.
Why plain setuptools: docs/decisions/001-native-build.md.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
PACKAGE_DIR = Path("perilune/native")


@dataclass(frozen=True)
class Source:
    """One translation unit. `flags` are for it alone (`-mavx2 -mfma`); `machines` names the processors it exists for, () = all."""

    path: str
    flags: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


@dataclass(frozen=True)
class NativeTarget:
    """One file in `perilune/native/`: a shared library, or (`executable`) a static program. Linked as C++ if a source is C++."""

    filename: str
    sources: tuple[Source, ...]
    link_flags: tuple[str, ...] = ()
    executable: bool = False


NATIVE_TARGETS = (NativeTarget("libperilune_cpu.so", sources=(Source("csrc/cpu/cpu.c"),)),)

COMPILE_FLAGS = ("-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Icsrc")
LANGUAGE_FLAGS = {".c": ("-std=gnu11",), ".cpp": ("-std=gnu++17",)}


class CompilerMissing(Exception):
    """No compiler that can make a program; the message says what to install."""


class CompileFailed(Exception):
    """The compiler works but refused our source: a fault to report, so the build stops."""


@dataclass(frozen=True)
class Toolchain:
    """Commands and the processor they compile for (`x86_64`, `aarch64`, ...)."""

    cc: tuple[str, ...]
    cxx: tuple[str, ...]
    machine: str
    system: str


def _command(variable: str, candidates: tuple[str, ...]) -> tuple[str, ...]:
    """The command that the environment variable names, else the first candidate on PATH, else ()."""
    given = tuple(shlex.split(os.environ.get(variable, "")))
    if given:
        return given if shutil.which(given[0]) else ()
    found = next((name for name in candidates if shutil.which(name)), None)
    return (found,) if found else ()


def _cxx_candidates(cc: tuple[str, ...]) -> tuple[str, ...]:
    """The C++ compiler of the same toolchain first: `aarch64-linux-gnu-gcc` goes with `aarch64-linux-gnu-g++`."""
    name = cc[-1]
    for c_name, cxx_name in (("gcc", "g++"), ("clang", "clang++")):
        if c_name in Path(name).name:
            return (cxx_name.join(name.rsplit(c_name, 1)), "c++")
    return ("c++", "g++", "clang++")


def find_toolchain() -> Toolchain:
    """The C and C++ compilers to use. Raises CompilerMissing when there is none, or none that can link a program."""
    cc = _command("CC", ("cc", "gcc", "clang"))
    if not cc:
        raise CompilerMissing(f"no C compiler ({os.environ.get('CC') or 'cc'}) on PATH; install one: apt-get install gcc libc6-dev")
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch, "probe.c")
        probe.write_text("#include <stdint.h>\n#include <stdlib.h>\nint main(void) { return EXIT_SUCCESS; }\n")
        result = subprocess.run([*cc, str(probe), "-o", str(probe.with_suffix(""))], capture_output=True, text=True)
    if result.returncode:
        detail = (result.stderr.strip().splitlines() or ["no message"])[0]
        raise CompilerMissing(f"{shlex.join(cc)} cannot make a program ({detail}); install what it lacks: apt-get install gcc libc6-dev")
    triple = subprocess.run([*cc, "-dumpmachine"], capture_output=True, text=True).stdout.strip()
    machine = triple.split("-")[0]
    return Toolchain(
        cc=cc,
        cxx=_command("CXX", _cxx_candidates(cc)),
        machine={"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine),
        system="linux" if "linux" in triple else triple,
    )


def _run(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.stderr:
        sys.stderr.write(result.stderr)
    if result.returncode:
        raise CompileFailed(f"{shlex.join(command)} failed with status {result.returncode}:\n{result.stderr}")


def _compile_command(toolchain: Toolchain, source: Source, output: Path) -> list[str]:
    is_c = source.path.endswith(".c")
    if not is_c and not toolchain.cxx:
        raise CompilerMissing(f"no C++ compiler for {source.path}; install one: apt-get install g++")
    compiler = toolchain.cc if is_c else toolchain.cxx
    user_flags = shlex.split(os.environ.get("CFLAGS" if is_c else "CXXFLAGS", ""))
    # The source's own flags come last: a user's -march must not change which instruction set a file is compiled for.
    flags = [*COMPILE_FLAGS, *LANGUAGE_FLAGS[Path(source.path).suffix], *user_flags, *source.flags]
    return [*compiler, *flags, "-c", source.path, "-o", str(output)]


def build_target(target: NativeTarget, toolchain: Toolchain, directory: Path) -> Path:
    """Compiles and links one target and moves it into `directory` in one step, so that a running process keeps the file it mapped."""
    sources = [source for source in target.sources if not source.machines or toolchain.machine in source.machines]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch, f"{index}-{Path(source.path).stem}.o") for index, source in enumerate(sources)]
        commands = [_compile_command(toolchain, source, output) for source, output in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linker = toolchain.cc if all(source.path.endswith(".c") for source in sources) else toolchain.cxx
        kind = ["-static"] if target.executable else ["-shared"]
        directory.mkdir(parents=True, exist_ok=True)
        output = directory / target.filename
        linked = directory / f".{target.filename}.{os.getpid()}"
        try:
            user_flags = shlex.split(os.environ.get("LDFLAGS", ""))
            _run([*linker, *kind, *map(str, objects), "-o", str(linked), *user_flags, *target.link_flags])
            linked.replace(output)
        finally:
            linked.unlink(missing_ok=True)
    return output


@lru_cache(maxsize=1)
def available_toolchain() -> Toolchain | None:
    """The toolchain, or None after saying on stderr why there is none."""
    try:
        return find_toolchain()
    except CompilerMissing as reason:
        print(f"warning: perilune is installed without its native code: {reason}", file=sys.stderr)
        return None


class BuildNative(Command):
    """`build_native`: compiles every target, into the build directory or (`--inplace`, editable installs) beside the Python files."""

    description = "compile csrc/ into perilune/native/"
    user_options = [("build-lib=", "b", "directory to build into"), ("inplace", "i", "build into the source tree")]  # noqa: RUF012
    boolean_options = ["inplace"]  # noqa: RUF012
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None
        self.inplace = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def _directory(self) -> Path:
        return ROOT / PACKAGE_DIR if self.inplace or self.editable_mode else Path(self.build_lib) / PACKAGE_DIR

    def run(self) -> None:
        toolchain = available_toolchain()
        for target in NATIVE_TARGETS:
            built = False
            try:
                if toolchain is not None:
                    build_target(target, toolchain, self._directory())
                    built = True
            except CompilerMissing as reason:
                print(f"warning: perilune is installed without {target.filename}: {reason}", file=sys.stderr)
            finally:
                if not built:  # never ship or load what an earlier build left there
                    (self._directory() / target.filename).unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        if self.editable_mode or available_toolchain() is None:
            return []
        return [str(Path(self.build_lib) / PACKAGE_DIR / target.filename) for target in NATIVE_TARGETS]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in {".c", ".cpp", ".h"})


class Build(build):
    """`build` with `build_native` after the Python files."""

    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012


class NativeDistribution(Distribution):
    """Tells setuptools that the wheel holds platform files exactly when there is a compiler to make them."""

    def has_ext_modules(self) -> bool:
        return available_toolchain() is not None


class Wheel(bdist_wheel):
    """`py3-none-PLATFORM`, the platform being the compiler's: the libraries depend on neither the Python version nor its ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        toolchain = available_toolchain()
        if toolchain is None:
            return super().get_tag()
        platform = self.plat_name or ""
        if not self.plat_name_supplied and toolchain.system == "linux":
            platform = f"linux_{toolchain.machine}"
        return "py3", "none", platform.lower().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    setup(
        distclass=NativeDistribution,
        cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": Wheel},
    )
