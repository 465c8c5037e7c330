"""`perilune doctor`: what this machine offers, what is missing, what it is needed for, and the command that installs it.

Every check is a small function that looks and returns `Check` values; it changes nothing and trusts nothing to exist. Checks that
read /proc, /sys and /etc take the root directory, so that tests can show them other machines.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from perilune.bench.machine import memory_bytes, processor_name, read_text, usable_cores
from perilune.errors import UserError
from perilune.native.isa import ISA_VARIABLE, choose_isa, detected_isa, levels_up_to
from perilune.native.library import load_library

State = Literal["ok", "limited", "missing"]
Room = Literal["machine", "python", "native", "gpu", "sandbox"]

TRANSFORMERS = "transformers==5.24.0"
ROOT = Path("/")


@dataclass(frozen=True)
class Check:
    """One thing looked at. `found` says what is there, `needed_for` what depends on it, `install` the exact command that puts it right
    (None when there is none, or nothing to put right)."""

    room: Room
    name: str
    state: State
    found: str
    needed_for: str
    install: str | None = None


def apt_command(*packages: str) -> str:
    """The command that installs Debian packages here: with sudo for users, in words on systems without apt-get."""
    if shutil.which("apt-get") is None:
        return f"install {' '.join(packages)} with this system's package manager"
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {' '.join(packages)}"


def pip_command(requirement: str) -> str:
    """The command that installs into the Python that runs now."""
    return f"{sys.executable} -m pip install {requirement}"


def check_cores() -> Check:
    cores, name = usable_cores(), processor_name(read_text(ROOT / "proc/cpuinfo"))
    return Check("machine", "cores", "ok" if cores >= 2 else "limited", f"{cores} usable, {name}", "the demo is timed for 2")


def check_memory(root: Path = ROOT) -> Check:
    text = read_text(root / "proc/meminfo")
    total, available = memory_bytes(text) / 2**30, memory_bytes(text, "MemAvailable") / 2**30
    found = f"{total:.1f} GiB, {available:.1f} available" if total else "unknown (no /proc/meminfo)"
    return Check("machine", "memory", "ok" if available >= 4 else "limited", found, "the demo uses up to 4 GB")


def check_disk(directory: Path) -> Check:
    free = shutil.disk_usage(directory).free / 2**30
    return Check(
        "machine", "disk", "ok" if free >= 2 else "limited", f"{free:.1f} GiB free in the working directory", "runs and checkpoints"
    )


def check_threads() -> Check:
    value = os.environ.get("OMP_NUM_THREADS")
    found = f"OMP_NUM_THREADS={value}" if value else "OMP_NUM_THREADS is unset: torch takes every core"
    return Check("machine", "threads", "ok", found, "one thread per process is best for small models")


def check_python() -> Check:
    where = f"{platform.python_version()} at {sys.executable}"
    return Check("python", "Python", "ok" if sys.version_info >= (3, 11) else "missing", where, "everything (3.11 or newer)")


def check_torch() -> Check:
    found = _installed("torch")
    if found is None:
        return Check("python", "torch", "missing", "not installed", "everything but the sandbox", "make setup")
    import torch

    return Check("python", "torch", "ok", f"{found}, threads: {torch.get_num_threads()}", "everything but the sandbox")


def check_transformers() -> Check:
    found = _installed("transformers")
    needed = "the baseline of benchmarks and golden tests"
    if found is None:
        return Check("python", "transformers", "missing", "not installed", needed, pip_command(TRANSFORMERS))
    if f"transformers=={found}" != TRANSFORMERS:
        return Check("python", "transformers", "limited", f"{found}, compared with {TRANSFORMERS}", needed, pip_command(TRANSFORMERS))
    return Check("python", "transformers", "ok", found, needed)


def check_compiler() -> Check:
    needed = "building the native library"
    command = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if command is None or shutil.which(command.split()[0]) is None:
        return Check("native", "compiler", "missing", f"{command or 'cc'} is not on PATH", needed, apt_command("gcc", "g++", "libc6-dev"))
    return Check("native", "compiler", "ok", _first_line([*command.split(), "--version"]), needed)


def check_library() -> Check:
    library = load_library()
    if library.reason is not None:
        return Check("native", "library", "missing", library.reason, "fast kernels; portable code runs instead", "make setup")
    return Check("native", "library", "ok", f"{library.path.name} loaded", "fast kernels")


def check_isa() -> Check:
    detected = detected_isa()
    needed = "which kernels run"
    try:
        selected = choose_isa(os.environ.get(ISA_VARIABLE), detected)
    except UserError as error:
        return Check("native", "instruction set", "missing", str(error), needed, f"unset {ISA_VARIABLE}")
    found = f"{selected} of {' < '.join(levels_up_to(detected))}"
    if selected != detected:
        return Check("native", "instruction set", "limited", f"{found}, by {ISA_VARIABLE}", needed, f"unset {ISA_VARIABLE}")
    return Check("native", "instruction set", "ok" if selected != "portable" else "limited", found, needed)


def check_gpu() -> Check:
    needed = "GPU kernels and larger models; not needed for the demo"
    smi = shutil.which("nvidia-smi")
    driver = _first_line([smi, "--query-gpu=name,memory.total", "--format=csv,noheader"]) if smi else ""
    if _installed("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return Check("gpu", "CUDA", "ok", f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}", needed)
        if driver:
            found = f"{driver}, but torch {torch.__version__} cannot use it"
            return Check("gpu", "CUDA", "limited", found, needed, "TORCH_SPEC=torch==2.13.0 make setup")
    return Check("gpu", "CUDA", "missing", driver or "no NVIDIA GPU", needed)


def check_triton() -> Check:
    found, needed = _installed("triton"), "GPU kernels; not needed without a GPU"
    if found is None:
        return Check("gpu", "triton", "missing", "not installed (it comes with torch's CUDA build)", needed)
    return Check("gpu", "triton", "ok", found, needed)


def check_crun() -> Check:
    return _program("crun", "crun", "sandboxes as OCI containers")


def check_user_namespaces(root: Path = ROOT) -> Check:
    needed = "sandboxes whose root is nobody on the host"
    limit = read_text(root / "proc/sys/user/max_user_namespaces").strip()
    if not limit.isdigit() or int(limit) == 0:
        found = "not offered by this kernel" if not limit else "switched off (max_user_namespaces is 0)"
        return Check("sandbox", "user namespaces", "missing", found, needed, "sysctl -w user.max_user_namespaces=10000" if limit else None)
    if os.geteuid() != 0:
        for path, bad in (("kernel/unprivileged_userns_clone", "0"), ("kernel/apparmor_restrict_unprivileged_userns", "1")):
            if read_text(root / "proc/sys" / path).strip() == bad:
                name = path.replace("/", ".")
                found, command = f"only for root ({name} is {bad})", f"sudo sysctl -w {name}={1 - int(bad)}"
                return Check("sandbox", "user namespaces", "limited", found, needed, command)
    return Check("sandbox", "user namespaces", "ok", f"up to {limit}", needed)


def check_subordinate_ids(root: Path = ROOT) -> Check:
    """Root may map any range; another user needs ranges in /etc/subuid and /etc/subgid, and newuidmap to use them."""
    needed = "a uid range per sandbox"
    if os.geteuid() == 0:
        return Check("sandbox", "uid ranges", "ok", "root maps any range", needed)
    user = pwd.getpwuid(os.geteuid()).pw_name
    owned = [
        sum(
            int(line.split(":")[2])
            for line in read_text(root / "etc" / name).splitlines()
            if line.split(":")[0] in (user, str(os.geteuid()))
        )
        for name in ("subuid", "subgid")
    ]
    if min(owned) < 65536:
        command = f"sudo usermod --add-subuids 1000000-1999999 --add-subgids 1000000-1999999 {user}"
        return Check("sandbox", "uid ranges", "missing", f"{min(owned)} ids for {user}", needed, command)
    if shutil.which("newuidmap") is None:
        return Check("sandbox", "uid ranges", "missing", "newuidmap is not installed", needed, apt_command("uidmap"))
    return Check("sandbox", "uid ranges", "ok", f"{min(owned)} ids for {user}", needed)


def check_cgroups(root: Path = ROOT) -> Check:
    """Layout (v1, v2 or hybrid) and which of the wanted controllers this process may use; rlimits stand in where none is writable."""
    needed = "memory, CPU and process limits of sandboxes, and pausing them"
    mounts = cgroup_mounts(read_text(root / "proc/self/mountinfo"))
    unified = [point for kind, point, _ in mounts if kind == "cgroup2"]
    legacy = {controller: point for kind, point, controllers in mounts if kind == "cgroup" for controller in controllers}
    if not unified and not legacy:
        return Check("sandbox", "cgroups", "limited", "none mounted; rlimits only", needed)
    layout = "hybrid" if unified and legacy else "v2" if unified else "v1"
    own = {controller: path for line in read_text(root / "proc/self/cgroup").splitlines() for controller, path in _membership(line)}
    writable = []
    for controller in ("memory", "cpu", "pids", "freezer"):
        if controller in legacy:
            directory = _own_directory(root, legacy[controller], own.get(controller, "/"))
        elif unified:
            directory = _own_directory(root, unified[0], own.get("", "/"))
            offered = read_text(directory / "cgroup.controllers").split()
            if controller not in offered and not (controller == "freezer" and layout == "v2"):  # v2 freezes without a controller
                continue
        else:
            continue
        if os.access(directory, os.W_OK):
            writable.append(controller)
    state: State = "ok" if len(writable) == 4 else "limited"
    return Check("sandbox", "cgroups", state, f"{layout}; writable: {', '.join(writable) or 'none, so rlimits only'}", needed)


def cgroup_mounts(mountinfo: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """(file system type, mount point, super options) of each cgroup mount in the text of /proc/self/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if separator and len(fields) > 4 and len(kinds) > 2 and kinds[0] in ("cgroup", "cgroup2"):
            found.append((kinds[0], fields[4], tuple(kinds[2].split(","))))
    return found


def check_seccomp(root: Path = ROOT) -> Check:
    has_filter = "Seccomp:" in read_text(root / "proc/self/status") or bool(read_text(root / "proc/sys/kernel/seccomp/actions_avail"))
    found = "system call filters" if has_filter else "not in this kernel"
    return Check("sandbox", "seccomp", "ok" if has_filter else "missing", found, "closing dangerous system calls")


def check_overlay(root: Path = ROOT) -> Check:
    needed = "a sandbox's root over shared read-only layers"
    if any(line.split()[-1:] == ["overlay"] for line in read_text(root / "proc/filesystems").splitlines()):
        return Check("sandbox", "overlayfs", "ok", "in the kernel", needed)
    return Check("sandbox", "overlayfs", "limited", "not loaded", needed, f"{'' if os.geteuid() == 0 else 'sudo '}modprobe overlay")


def check_kvm(root: Path = ROOT) -> Check:
    needed = "microVMs at full speed; QEMU emulates without it"
    device = root / "dev/kvm"
    if not device.exists():
        return Check("sandbox", "KVM", "missing", "no /dev/kvm", needed)
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        allowed = f"sudo adduser {pwd.getpwuid(os.geteuid()).pw_name} kvm" if isinstance(error, PermissionError) and os.geteuid() else None
        return Check("sandbox", "KVM", "limited", f"/dev/kvm cannot be opened ({error.strerror})", needed, allowed)
    return Check("sandbox", "KVM", "ok", "/dev/kvm opens", needed)


def check_qemu() -> Check:
    machine = platform.machine()
    return _program(f"qemu-system-{machine}", "qemu-system-arm" if machine == "aarch64" else "qemu-system-x86", "microVM sandboxes")


CHECKS: tuple[tuple[Room, str, Callable[[], Check]], ...] = (
    ("machine", "cores", check_cores),
    ("machine", "memory", check_memory),
    ("machine", "disk", lambda: check_disk(Path.cwd())),
    ("machine", "threads", check_threads),
    ("python", "Python", check_python),
    ("python", "torch", check_torch),
    ("python", "transformers", check_transformers),
    ("native", "compiler", check_compiler),
    ("native", "library", check_library),
    ("native", "instruction set", check_isa),
    ("gpu", "CUDA", check_gpu),
    ("gpu", "triton", check_triton),
    ("sandbox", "crun", check_crun),
    ("sandbox", "user namespaces", check_user_namespaces),
    ("sandbox", "uid ranges", check_subordinate_ids),
    ("sandbox", "cgroups", check_cgroups),
    ("sandbox", "seccomp", check_seccomp),
    ("sandbox", "overlayfs", check_overlay),
    ("sandbox", "KVM", check_kvm),
    ("sandbox", "qemu", check_qemu),
)


def examine() -> tuple[Check, ...]:
    """Runs every check. One that fails on an odd machine becomes a `limited` row that says how; it never stops the others."""
    return tuple(_survive(room, name, look) for room, name, look in CHECKS)


def dumps(checks: tuple[Check, ...]) -> str:
    """The checks as a JSON list of objects, in the order of the table."""
    return json.dumps([dataclasses.asdict(check) for check in checks], indent=1, ensure_ascii=False)


def show(checks: tuple[Check, ...], console: Console) -> None:
    """Prints the table by rooms, then each command that adds something, once."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in ("", "state", "found", "needed for"):
        table.add_column(header, overflow="fold")
    styles: dict[State, str] = {"ok": "green", "limited": "yellow", "missing": "red"}
    room = None
    for check in checks:
        if check.room != room:
            room = check.room
            table.add_row(Text(room, style="bold"), "", "", "")
        table.add_row(f"  {check.name}", Text(check.state, style=styles[check.state]), Text(check.found), Text(check.needed_for))
    console.print(table)
    commands = {check.install: check.name for check in reversed(checks) if check.install}
    if commands:
        lines = [Text.assemble((f"  {name}: ", "bold"), command) for command, name in reversed(commands.items())]
        console.print(Group(Text("\nTo add what is missing:"), *lines), soft_wrap=True)


def _survive(room: Room, name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Exception as error:
        return Check(room, name, "limited", f"could not be examined ({type(error).__name__}: {error})", "")


def _installed(package: str) -> str | None:
    """The installed version of a Python package that can be found, without importing it."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _program(command: str, package: str, needed_for: str) -> Check:
    if shutil.which(command) is None:
        return Check("sandbox", command, "missing", "not on PATH", needed_for, apt_command(package))
    return Check("sandbox", command, "ok", _first_line([command, "--version"]), needed_for)


def _first_line(command: list[str]) -> str:
    """The first line that the command prints, "" when it cannot be run."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return output.strip().partition("\n")[0]


def _membership(line: str) -> list[tuple[str, str]]:
    """(controller, path) pairs of a line of /proc/self/cgroup; the unified hierarchy's controller is ""."""
    parts = line.split(":", 2)
    return [(controller, parts[2]) for controller in parts[1].split(",")] if len(parts) == 3 else []


def _own_directory(root: Path, mount_point: str, path: str) -> Path:
    """Where this process's group is; the mount point itself when a container shows only part of the tree."""
    mount = root / mount_point.lstrip("/")
    own = mount / path.lstrip("/")
    return own if own.is_dir() else mount
