"""The linter, the formatter and the type checker, so that `make test` says what `make check` says."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(600)  # the type checker reads torch's annotations the first time
@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_the_tree_is_clean_under(command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
