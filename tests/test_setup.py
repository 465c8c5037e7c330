"""tools/setup.sh: what it decides on machines that the tests describe with planted commands. Nothing is downloaded: it runs dry.

The one test that really installs is marked `soak`.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = """
    awk basename bash cat cp cut df dirname env find flock grep head
    id ls mkdir mktemp mv pwd readlink rm sed sha256sum sort tail touch tr xargs
"""
PYTHON = """case "$*" in
  *"sys.version_info < (3, 11)"*) exit {too_old} ;;
  *"sys.version.split"*) echo 3.9.2 ;;
  *"pip --version"*) echo pip ;;
  "-") cat >/dev/null; echo "{torch}" ;;
  *'version("torch")'*) echo "{torch}" ;;
esac"""


@dataclass
class Machine:
    """A copy of what setup reads, and a PATH on which only planted commands and the base tools exist."""

    root: Path
    commands: Path
    environment: dict[str, str] = field(default_factory=dict)

    def plant(self, command: str, script: str) -> None:
        path = self.commands / command
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def plant_venv(self, torch: str) -> None:
        """A .venv whose Python says that this torch is installed and in range ("" = none)."""
        path = self.root / ".venv" / "bin" / "python"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{PYTHON.format(too_old=0, torch=torch)}\n")
        path.chmod(0o755)

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.commands), "SETUP_DRY_RUN": "1", **self.environment, **variables}
        return subprocess.run([self.root / "tools" / "setup.sh"], env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A Debian machine, the user root, every package installed, no GPU, 100 GB free."""
    root, commands = tmp_path / "checkout", tmp_path / "bin"
    commands.mkdir()
    for name in NEEDED.split():
        found = shutil.which(name)
        if found:
            (commands / name).symlink_to(found)
    (root / "perilune" / "native").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "tools", root / "tools")
    shutil.copytree(ROOT / "csrc", root / "csrc")
    described = Machine(root, commands)
    described.plant("python3", PYTHON.format(too_old=0, torch=""))
    described.plant("dpkg-query", "echo installed")
    described.plant("apt-get", "exit 0")
    described.plant("id", "echo 0")
    described.plant("df", "echo Filesystem; echo '/dev/sda1 200000000 100000000 100000000 50% /'")
    described.plant("cc", "exit 0")
    return described


def planned(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stdout + result.stderr
    return [line.removeprefix("would run: ") for line in result.stdout.splitlines() if line.startswith("would run: ")]


def test_a_fresh_machine_gets_a_venv_the_cpu_torch_and_the_pinned_packages(machine: Machine) -> None:
    venv, build_tools, torch, packages = planned(machine.setup())
    assert venv == "python3 -m venv --clear .venv"
    assert build_tools.endswith("pip install -q -c constraints.txt setuptools>=77")
    assert torch == ".venv/bin/python -m pip install --no-deps torch==2.13.0+cpu"
    assert packages.endswith("-e .[dev]")
    assert packages.count(" -c ") == 2  # the pins, and torch held at what is installed


def test_the_sizes_are_said_before_anything_is_done(machine: Machine) -> None:
    lines = machine.setup().stdout.splitlines()
    assert "MB to download" in lines[0]
    assert "MB of disk needed" in lines[0]
    assert all("would run" not in line for line in lines[:1])


def test_a_gpu_gets_the_cuda_build_of_the_configured_index(machine: Machine) -> None:
    machine.plant("nvidia-smi", "echo 'GPU 0: A GPU'")
    result = machine.setup()
    assert ".venv/bin/python -m pip install --no-deps torch==2.13.0" in planned(result)
    assert "CUDA build" in result.stdout


def test_a_driver_without_a_gpu_does_not_count_as_one(machine: Machine) -> None:
    machine.plant("nvidia-smi", "echo 'No devices were found'; exit 6")
    assert any(line.endswith("torch==2.13.0+cpu") for line in planned(machine.setup()))


def test_where_the_index_has_no_cpu_build_pytorchs_own_is_asked(machine: Machine) -> None:
    without_cpu_builds = 'case "$*" in *+cpu*) echo "No matching distribution" >&2; exit 1 ;; esac'
    lines = pip_calls(machine, without_cpu_builds)
    assert [line for line in lines if "torch==" in line][:2] == [
        "-m pip install --no-deps torch==2.13.0+cpu",
        "-m pip install --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0",
    ]


def test_without_any_torch_one_sentence_names_both_variables(machine: Machine) -> None:
    result = real_run(machine, 'case "$*" in *torch*) echo "no such thing" >&2; exit 1 ;; esac')
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "TORCH_SPEC" in last
    assert "TORCH_INDEX" in last
    assert "no such thing" in result.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TORCH_SPEC": "torch==2.14.1"}, "--force-reinstall torch==2.14.1"),
        ({"TORCH_INDEX": "https://example.org/simple"}, "--force-reinstall --index-url https://example.org/simple torch==2.13.0"),
        (
            {"TORCH_SPEC": "torch==2.14.1", "TORCH_INDEX": "https://example.org/simple"},
            "--force-reinstall --index-url https://example.org/simple torch==2.14.1",
        ),
    ],
)
def test_a_torch_that_was_asked_for_overrides_every_rule(machine: Machine, variables: dict[str, str], expected: str) -> None:
    machine.plant("nvidia-smi", "echo 'GPU 0: A GPU'")
    machine.plant_venv(torch="2.12.0")
    torch_lines = [line for line in planned(machine.setup(**variables)) if "--no-deps" in line]
    assert torch_lines == [f".venv/bin/python -m pip install --no-deps {expected}"]


def test_a_venv_that_has_torch_keeps_it(machine: Machine) -> None:
    machine.plant_venv(torch="2.12.0+rocm")
    result = machine.setup()
    assert "keeping torch 2.12.0+rocm" in result.stdout
    assert not any("install --no-deps" in line or "venv --clear" in line for line in planned(result))


def test_a_venv_without_a_usable_torch_gets_one_and_stays(machine: Machine) -> None:
    machine.plant_venv(torch="")
    lines = planned(machine.setup())
    assert not any("venv --clear" in line for line in lines)
    assert any(line.endswith("torch==2.13.0+cpu") for line in lines)


def test_a_venv_that_does_not_run_is_made_anew(machine: Machine) -> None:
    (machine.root / ".venv" / "bin").mkdir(parents=True)
    (machine.root / ".venv" / "bin" / "python").symlink_to("/nonexistent/python3")
    result = machine.setup()
    assert "making it anew" in result.stdout
    assert planned(result)[0] == "python3 -m venv --clear .venv"


def test_a_package_that_was_half_installed_is_installed_again(machine: Machine) -> None:
    machine.plant_venv(torch="2.13.0")
    site = machine.root / ".venv" / "lib" / "python3.11" / "site-packages"
    (site / "half-1.0.dist-info").mkdir(parents=True)
    (site / "whole-1.0.dist-info").mkdir()
    (site / "whole-1.0.dist-info" / "INSTALLER").write_text("pip\n")
    removed = [line for line in planned(machine.setup()) if line.startswith("rm ")]
    assert removed == ["rm -r .venv/lib/python3.11/site-packages/half-1.0.dist-info"]


def test_too_little_disk_is_refused_before_anything_is_done(machine: Machine) -> None:
    machine.plant("df", "echo Filesystem; echo '/dev/sda1 2000000 1500000 500000 75% /'")
    result = machine.setup()
    assert result.returncode == 1
    assert result.stderr.startswith("setup: only 500 MB are free")
    assert result.stderr.count("\n") == 1
    assert "would run" not in result.stdout


def test_an_old_python_is_refused_and_told_how_to_name_another(machine: Machine) -> None:
    machine.plant("python3", PYTHON.format(too_old=1, torch=""))
    result = machine.setup()
    assert result.returncode == 1
    assert "needs Python 3.11 or newer and python3 is 3.9.2" in result.stderr
    assert "make setup PYTHON=" in result.stderr


def test_another_python_can_be_named(machine: Machine) -> None:
    machine.plant("python3.13", PYTHON.format(too_old=0, torch=""))
    assert planned(machine.setup(PYTHON="python3.13"))[0] == "python3.13 -m venv --clear .venv"


def test_no_python_is_a_sentence(machine: Machine) -> None:
    result = machine.setup(PYTHON="python9")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "there is no python9" in result.stderr


def test_root_installs_the_missing_debian_packages(machine: Machine) -> None:
    machine.plant("dpkg-query", 'case "$*" in *gcc*) exit 1 ;; esac; echo installed')
    update, install = planned(machine.setup())[:2]
    assert update == "apt-get update -qq"
    assert install.startswith("apt-get install -qq -y --no-install-recommends")
    assert install.endswith(" gcc")


def test_a_removed_package_counts_as_missing(machine: Machine) -> None:
    machine.plant("dpkg-query", 'case "$*" in *make*) echo config-files; exit 0 ;; esac; echo installed')
    assert planned(machine.setup())[1].endswith(" make")


def test_a_user_is_told_the_command_and_setup_goes_on(machine: Machine) -> None:
    machine.plant("id", "echo 1000")
    machine.plant("dpkg-query", 'case "$*" in *libc6-dev*|*g++*) exit 1 ;; esac; echo installed')
    result = machine.setup()
    assert "sudo apt-get install --no-install-recommends g++ libc6-dev" in result.stdout
    assert not any("apt-get" in line for line in planned(result))
    assert any(line.endswith("-e .[dev]") for line in planned(result))


def test_another_distribution_is_named_and_setup_goes_on(machine: Machine) -> None:
    (machine.commands / "apt-get").unlink()
    result = machine.setup()
    assert "no Debian system" in result.stdout
    assert any(line.endswith("-e .[dev]") for line in planned(result))


def test_every_debian_package_has_its_reason() -> None:
    lines = (ROOT / "tools" / "debian-packages.txt").read_text().splitlines()
    packages = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {"python3-venv", "gcc", "libc6-dev", "make", "ca-certificates"} <= {package[0] for package in packages}
    assert all(len(package) == 2 for package in packages)


def test_the_pins_are_exact_and_leave_pip_and_torch_alone() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(pins) > 20
    assert all(line.count("==") == 1 for line in pins)
    assert not {"pip", "torch", "triton", "perilune"} & {line.split("==")[0] for line in pins}


def real_run(machine: Machine, python: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs setup for real with a `python` (of the system and of .venv) that logs its arguments, makes .venv, and runs the given script."""
    log = machine.root.parent / "python.log"
    script = f"""echo "$*" >>{log}
{python}
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin && cp {machine.commands}/python3 .venv/bin/python ;;
  *"pip install"*"-e ."*) touch perilune/native/libperilune_cpu.so ;;
esac
{PYTHON.format(too_old=0, torch="2.13.0+cpu")}"""
    if not (machine.commands / "python3").exists() or "python.log" not in (machine.commands / "python3").read_text():
        machine.plant("python3", script)
    return machine.setup(SETUP_DRY_RUN="", **variables)


def pip_calls(machine: Machine, python: str, **variables: str) -> list[str]:
    """What `real_run` asked of pip, in order, since the last call."""
    log = machine.root.parent / "python.log"
    log.unlink(missing_ok=True)
    result = real_run(machine, python, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in log.read_text().splitlines() if "pip install" in line] if log.exists() else []


def test_a_second_run_does_nothing(machine: Machine) -> None:
    assert pip_calls(machine, "")
    assert pip_calls(machine, "") == []


Change = Callable[[Machine], None]
REBUILD = "-m pip install -q --no-deps --no-build-isolation -e ."
CHANGES: dict[str, tuple[Change, str]] = {
    "a source file": (lambda m: (m.root / "csrc" / "cpu" / "cpu.c").write_text("int x;"), REBUILD),
    "the native library gone": (lambda m: (m.root / "perilune" / "native" / "libperilune_cpu.so").unlink(), REBUILD),
    "a pin": (lambda m: (m.root / "constraints.txt").write_text("numpy==2.4.6\n"), "-e .[dev]"),
    "a dependency": (lambda m: (m.root / "pyproject.toml").write_text('[project]\ndependencies = ["torch"]\n'), "-e .[dev]"),
    "a compiler installed": (lambda m: m.plant("gcc", "exit 0"), REBUILD),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_taken_up_by_the_next_run_and_torch_stays(machine: Machine, name: str) -> None:
    pip_calls(machine, "")
    change, expected = CHANGES[name]
    change(machine)
    calls = pip_calls(machine, "")
    assert calls[-1].endswith(expected)
    assert not any("torch==" in call for call in calls)
    assert pip_calls(machine, "") == []


def test_torch_is_held_while_the_packages_are_installed(machine: Machine) -> None:
    keep = 'case "$*" in *"-e .[dev]"*) for file; do case "$file" in /tmp/*|*/tmp.*) cat "$file" >>held ;; esac; done ;; esac'
    pip_calls(machine, keep)
    assert (machine.root / "held").read_text() == "torch==2.13.0+cpu\n"


def test_an_interrupted_run_is_finished_by_the_next(machine: Machine) -> None:
    failing = f'case "$*" in *"-e .[dev]"*) [ -e {machine.root}/network ] || exit 1 ;; esac'
    assert real_run(machine, failing).returncode == 1
    (machine.root / "network").touch()
    assert pip_calls(machine, failing)[-1].endswith("-e .[dev]")
    assert pip_calls(machine, failing) == []


def test_a_torch_asked_for_once_is_kept_and_another_one_replaces_it(machine: Machine) -> None:
    asked = [call for call in pip_calls(machine, "", TORCH_SPEC="torch==2.14.1") if "torch==" in call]
    assert asked == ["-m pip install --no-deps --force-reinstall torch==2.14.1"]
    assert pip_calls(machine, "", TORCH_SPEC="torch==2.14.1") == []
    assert pip_calls(machine, "") == []
    again = [call for call in pip_calls(machine, "", TORCH_SPEC="torch==2.13.0") if "torch==" in call]
    assert again == ["-m pip install --no-deps --force-reinstall torch==2.13.0"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_copy_of_the_tree_sets_itself_up_and_runs(tmp_path: Path) -> None:
    """Downloads what a user's first `make setup` downloads."""
    copy = tmp_path / "perilune"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "build", "runs", "*.so", "*.egg-info", ".*_cache", "__pycache__")
    )
    variables = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    subprocess.run(["make", "setup"], cwd=copy, env=variables, check=True)
    report = subprocess.run([copy / ".venv/bin/perilune", "doctor", "--json"], cwd=copy, env=variables, capture_output=True, text=True)
    assert report.returncode == 0, report.stderr
    assert (copy / "perilune" / "native" / "libperilune_cpu.so").exists()
