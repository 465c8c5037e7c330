"""The command line from outside: what it prints, where, and with which exit status."""

import ast
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import perilune
from perilune import bench, cli
from perilune.bench import command
from perilune.bench.machine import Machine
from perilune.bench.report import Figure, make_report
from perilune.errors import UserError

MACHINE = Machine(cpu="A Processor", isa="avx2", cores=2, memory_gb=24, gpu=None, torch="2.13.0", load_before=0.1)


def perilune_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run([sys.executable, "-m", "perilune", *arguments], capture_output=True, text=True, env=variables)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["perilune", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.fixture
def planted_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with one benchmark that measures nothing, on a machine that is always the same."""

    def run(quick: bool) -> list[Figure]:
        return [Figure("speed", 2.0 if quick else 3.0, "ratio", "higher", goal=2.5)]

    monkeypatch.setattr(command, "BENCHES", {"planted": bench.Bench("none", "measures nothing")})
    monkeypatch.setattr(command, "load_bench", lambda name: run)
    monkeypatch.setattr(command, "this_machine", lambda: MACHINE)
    monkeypatch.setattr(command, "current_commit", lambda directory: "abc")


def test_help_describes_the_system_and_lists_the_commands() -> None:
    result = perilune_command("--help")
    assert result.returncode == 0
    assert "implementation of the Kimi K3 system" in result.stdout
    for name in ("doctor", "bench"):
        assert name in result.stdout


def test_help_loads_no_heavy_library() -> None:
    script = "import sys; sys.argv = ['perilune', '--help']\ntry:\n    from perilune.cli import main; main()\nexcept SystemExit: pass\n"
    script += "print([name for name in ('torch', 'numpy', 'transformers', 'tokenizers') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_command_module_imports_nothing_heavy_at_its_top() -> None:
    tree = ast.parse(Path(cli.__file__).read_text())
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert names == {"sys", "pathlib", "typing", "typer", "perilune", "perilune.errors"}


def test_version_is_the_packages() -> None:
    assert perilune_command("--version").stdout == f"perilune {perilune.__version__}\n"


def test_a_mistake_of_the_user_is_one_sentence_and_status_2() -> None:
    result = perilune_command("bench", "no-such-bench")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("perilune: There is no benchmark 'no-such-bench'")
    assert result.stderr.count("\n") == 1


def test_an_unknown_command_is_status_2_without_a_traceback() -> None:
    result = perilune_command("fly")
    assert result.returncode == 2
    assert "No such command" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_sentence_that_was_wrapped_in_the_source_is_printed_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise UserError("The port is\n    in use.")

    monkeypatch.setattr(command, "run_benches", fail)
    assert run_main(monkeypatch, "bench", "kda") == 2
    assert capsys.readouterr().err == "perilune: The port is in use.\n"


def test_ctrl_c_is_status_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "run_benches", interrupted)
    assert run_main(monkeypatch, "bench", "kda") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(command, "run_benches", broken)
    monkeypatch.setattr(sys, "argv", ["perilune", "bench", "kda"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()


def test_bench_list_names_every_bench_with_its_description() -> None:
    result = perilune_command("bench", "--list")
    assert result.returncode == 0
    for name, entry in bench.BENCHES.items():
        assert name in result.stdout
        assert entry.description in result.stdout


@pytest.mark.usefixtures("planted_bench")
def test_bench_prints_a_table_and_writes_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "planted.json"
    assert run_main(monkeypatch, "bench", "planted", "--json", str(path)) == 0
    report = json.loads(path.read_text())
    assert (report["bench"], report["commit"], report["figures"][0]["value"]) == ("planted", "abc", 3.0)
    assert datetime.fromisoformat(report["date"]).tzinfo == UTC
    assert "met" in capsys.readouterr().out


@pytest.mark.usefixtures("planted_bench")
def test_bench_json_dash_puts_the_report_alone_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "bench", "planted", "--quick", "--json", "-") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["figures"][0]["value"] == 2.0
    assert "missed" in printed.err


@pytest.mark.usefixtures("planted_bench")
def test_bench_all_writes_one_report_a_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_main(monkeypatch, "bench", "all", "--json", str(tmp_path / "results")) == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["planted.json"]


@pytest.mark.usefixtures("planted_bench")
def test_bench_from_reprints_and_marks_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "planted.json"
    earlier = make_report(
        "planted", [Figure("speed", 7.0, "ratio", "higher")], version="0.1.0", commit="abc", date=datetime.now(UTC), machine=MACHINE
    )
    path.write_text(earlier.dumps())
    assert run_main(monkeypatch, "bench", "planted", "--from", str(path), "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["figures"][0]["reused"] is True


@pytest.mark.usefixtures("planted_bench")
def test_a_report_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "load_bench", lambda name: pytest.fail)
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "report.json"):
        assert run_main(monkeypatch, "bench", "planted", "--json", str(path)) == 2
        assert str(path) in capsys.readouterr().err


def test_doctor_prints_a_table_by_rooms() -> None:
    result = perilune_command("doctor")
    assert result.returncode == 0
    for room in ("machine", "python", "native", "gpu", "sandbox"):
        assert f"\n{room} " in result.stdout


def test_doctor_json_has_a_state_for_every_check() -> None:
    checks = json.loads(perilune_command("doctor", "--json").stdout)
    assert {"torch", "compiler", "library", "instruction set", "user namespaces", "cgroups", "KVM"} <= {check["name"] for check in checks}
    assert {check["state"] for check in checks} <= {"ok", "limited", "missing"}


def test_doctor_survives_an_impossible_instruction_set_and_says_how_to_undo_it() -> None:
    result = perilune_command("doctor", "--json", PERILUNE_ISA="sse9")
    row = next(check for check in json.loads(result.stdout) if check["name"] == "instruction set")
    assert (row["state"], row["install"]) == ("missing", "unset PERILUNE_ISA")
    assert "sse9" in row["found"]
