"""The doctor on planted machines: cgroup layouts, kernels with parts missing, and files that are not there at all."""

import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from perilune import doctor
from perilune.doctor import Check, apt_command, examine, show

V1 = "30 25 0:26 / /sys/fs/cgroup/{0} rw,relatime shared:9 - cgroup cgroup rw,{0}\n"
V2 = "31 25 0:27 / {0} rw,relatime - cgroup2 cgroup rw\n"
TEMPORARY = "25 20 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"


def plant(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)  # daemon: in every passwd file


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_cgroup_v2_lists_the_controllers_of_the_own_group(tmp_path: Path) -> None:
    plant(tmp_path, "proc/self/mountinfo", V2.format("/sys/fs/cgroup"))
    plant(tmp_path, "proc/self/cgroup", "0::/user.slice\n")
    plant(tmp_path, "sys/fs/cgroup/user.slice/cgroup.controllers", "cpu memory pids\n")
    check = doctor.check_cgroups(tmp_path)
    assert (check.state, check.found) == ("ok", "v2; writable: memory, cpu, pids, freezer")


def test_cgroup_v2_without_delegated_controllers_is_limited(tmp_path: Path) -> None:
    plant(tmp_path, "proc/self/mountinfo", V2.format("/sys/fs/cgroup"))
    plant(tmp_path, "proc/self/cgroup", "0::/\n")
    plant(tmp_path, "sys/fs/cgroup/cgroup.controllers", "pids\n")
    assert (doctor.check_cgroups(tmp_path).state, doctor.check_cgroups(tmp_path).found) == ("limited", "v2; writable: pids, freezer")


def test_cgroup_v1_looks_into_each_controllers_own_tree(tmp_path: Path) -> None:
    plant(tmp_path, "proc/self/mountinfo", TEMPORARY + V1.format("memory") + V1.format("pids"))
    plant(tmp_path, "proc/self/cgroup", "2:memory:/hidden/by/a/container\n1:pids:/\n")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    assert doctor.check_cgroups(tmp_path).found == "v1; writable: memory"


def test_a_hybrid_layout_is_named(tmp_path: Path) -> None:
    plant(tmp_path, "proc/self/mountinfo", TEMPORARY + V1.format("memory") + V2.format("/sys/fs/cgroup/unified"))
    plant(tmp_path, "proc/self/cgroup", "1:memory:/\n0::/\n")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    assert doctor.check_cgroups(tmp_path).found == "hybrid; writable: memory"


def test_without_cgroups_rlimits_are_named(tmp_path: Path) -> None:
    assert doctor.check_cgroups(tmp_path).found == "none mounted; rlimits only"


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize(("limit", "state"), [("96365\n", "ok"), ("0\n", "missing"), (None, "missing")])
def test_user_namespaces_follow_the_kernels_limit(tmp_path: Path, limit: str | None, state: str) -> None:
    if limit is not None:
        plant(tmp_path, "proc/sys/user/max_user_namespaces", limit)
    assert doctor.check_user_namespaces(tmp_path).state == state


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("switch", "value", "command"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    ],
)
def test_a_distributions_lock_on_user_namespaces_is_named(tmp_path: Path, switch: str, value: str, command: str) -> None:
    plant(tmp_path, "proc/sys/user/max_user_namespaces", "96365\n")
    plant(tmp_path, f"proc/sys/{switch}", f"{value}\n")
    check = doctor.check_user_namespaces(tmp_path)
    assert (check.state, check.install) == ("limited", command)


@pytest.mark.usefixtures("as_user")
def test_a_user_needs_ranges_in_both_files_and_the_tool_that_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert doctor.check_subordinate_ids(tmp_path).found == "0 ids for daemon"
    plant(tmp_path, "etc/subuid", "other:100000:65536\ndaemon:165536:65536\n")
    assert "usermod --add-subuids" in str(doctor.check_subordinate_ids(tmp_path).install)
    plant(tmp_path, "etc/subgid", "daemon:165536:65536\n")
    assert doctor.check_subordinate_ids(tmp_path).state == "ok"
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "newuidmap" else f"/usr/bin/{name}")
    assert doctor.check_subordinate_ids(tmp_path).install == "sudo apt-get install uidmap"


@pytest.mark.usefixtures("as_root")
def test_root_needs_no_ranges(tmp_path: Path) -> None:
    assert doctor.check_subordinate_ids(tmp_path).state == "ok"


def test_a_kernel_without_parts_is_said_to_lack_them(tmp_path: Path) -> None:
    states = [look(tmp_path).state for look in (doctor.check_seccomp, doctor.check_overlay, doctor.check_kvm)]
    assert states == ["missing", "limited", "missing"]


def test_kernel_parts_are_found(tmp_path: Path) -> None:
    plant(tmp_path, "proc/self/status", "Name:\tpython\nSeccomp:\t0\n")
    plant(tmp_path, "proc/filesystems", "nodev\ttmpfs\nnodev\toverlay\n\text4\n")
    plant(tmp_path, "dev/kvm", "")
    assert [look(tmp_path).state for look in (doctor.check_seccomp, doctor.check_overlay, doctor.check_kvm)] == ["ok", "ok", "ok"]


@pytest.mark.usefixtures("as_user")
def test_install_commands_use_sudo_only_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert apt_command("crun") == "sudo apt-get install crun"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert apt_command("crun", "uidmap") == "apt-get install crun uidmap"


def test_a_system_without_apt_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert apt_command("crun") == "install crun with this system's package manager"


def test_a_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert doctor.check_crun().state == "missing"
    assert "crun" in str(doctor.check_crun().install)
    assert "gcc g++ libc6-dev" in str(doctor.check_compiler().install)


def test_a_check_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise RuntimeError("an odd machine")

    monkeypatch.setattr(doctor, "CHECKS", (("machine", "odd", broken), *doctor.CHECKS))
    checks = examine()
    assert (checks[0].state, checks[0].found) == ("limited", "could not be examined (RuntimeError: an odd machine)")
    assert len(checks) == len(doctor.CHECKS)


def test_the_table_prints_each_install_command_once_and_unwrapped() -> None:
    command = "apt-get install " + " ".join(f"package-{index}" for index in range(30))
    checks = tuple(Check("sandbox", name, "missing", "not on PATH", "tests", command) for name in ("one", "two"))
    console = Console(width=60, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    show(checks, console)
    assert console.export_text().count(command) == 1


def test_square_brackets_from_the_machine_are_shown_and_not_read_as_markup() -> None:
    console = Console(width=120, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    show((Check("native", "library", "missing", "libc [bold]", "tests", "pip install 'perilune[dev]'"),), console)
    text = console.export_text()
    assert "libc [bold]" in text
    assert "perilune[dev]" in text
