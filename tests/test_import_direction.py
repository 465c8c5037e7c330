"""Imports go one way through the rooms of the package (docs/decisions and the architecture say why); this walks the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "perilune"

# Which rooms each room may import. `perilune.errors` and the bare package are open to all.
ALLOWED: dict[str, set[str]] = {
    "native": set(),
    "kda": {"native"},
    "moe": {"native"},
    "model": {"native", "kda", "moe"},
    "train": {"native", "kda", "moe", "model"},
    "serve": {"native", "kda", "moe", "model"},
    "rl": {"native", "kda", "moe", "model", "train", "serve.client"},
    "sandbox": set(),
    "report": set(),
    "recipes": set(),
    "errors": set(),
}
TOP = {"demo", "bench", "cli", "doctor", "__main__"}
"""May import everything, and only one another may import them."""


def imported_names(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything below `perilune` that the module imports, at any depth and in any form."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            if function in ("import_module", "__import__"):
                name = node.args[0].value
                level = len(name) - len(name.lstrip("."))
                base = here[: len(here) - level + 1] if level else []
                yield node.lineno, ".".join([*base, name.lstrip(".")])


def violation(room: str, target: str) -> str | None:
    """Why a module of `room` may not import the dotted name `target`; None when it may."""
    parts = target.split(".")
    if parts[0] != "perilune" or len(parts) == 1:
        return None
    other = parts[1]
    if other in TOP:
        return None if room in TOP else f"nothing imports perilune.{other}"
    if other not in ALLOWED:
        return None  # a name of the bare package, such as __version__
    if room in TOP or other == room or other == "errors":
        return None
    if room not in ALLOWED:
        return f"perilune.{room} is a new room: enter it in ALLOWED"
    if other in ALLOWED[room] or ".".join(parts[1:3]) in ALLOWED[room]:
        return None
    return f"perilune.{room} may not import {target}"


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        names = [*relative.parts[:-1], *([] if path.stem == "__init__" else [path.stem])]
        module = ".".join(["perilune", *names])
        room = names[0] if names else ""
        for line, target in imported_names(ast.parse(path.read_text()), module, path.stem == "__init__"):
            reason = violation(room, target)
            if reason:
                found.append(f"{relative}:{line}: {reason}")
    return found


def test_imports_go_one_way() -> None:
    assert violations(PACKAGE) == []


def test_every_room_of_the_package_is_known() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - TOP - set(ALLOWED) - {"__init__"} == set()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("kda/api.py", "import perilune.model\n"),
        ("kda/api.py", "from perilune.moe.router import route\n"),
        ("kda/api.py", "from perilune import train\n"),
        ("kda/deep/er.py", "from ...moe import router\n"),
        ("kda/__init__.py", "from ..model.state import State\n"),
        ("moe/router.py", "from .. import kda\n"),
        ("moe/router.py", "def late():\n    from perilune.kda import chunk_kda\n"),
        ("native/isa.py", "import importlib\nimportlib.import_module('perilune.kda.api')\n"),
        ("native/isa.py", "from importlib import import_module\nimport_module('..kda', __package__)\n"),
        ("model/decoder.py", "__import__('perilune.train')\n"),
        ("serve/engine.py", "from perilune.train.loop import step\n"),
        ("train/loop.py", "from perilune.serve.client import Client\n"),
        ("rl/rollout.py", "from perilune.serve.engine import Engine\n"),
        ("rl/rollout.py", "import perilune.serve\n"),
        ("rl/rollout.py", "import perilune.sandbox\n"),
        ("sandbox/api.py", "from perilune.native import library\n"),
        ("report/html.py", "from perilune.rl import trajectory\n"),
        ("errors.py", "from perilune.native import library\n"),
        ("kda/api.py", "from perilune import bench\n"),
        ("serve/api.py", "from perilune.cli import app\n"),
        ("kda/api.py", "if TYPE_CHECKING:\n    from perilune.doctor import Check\n"),
        ("attic/old.py", "import perilune.kda\n"),
        ("__init__.py", "from perilune.kda import chunk_kda\n"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("kda/api.py", "import torch\nfrom perilune import __version__\nfrom perilune.errors import UserError\n"),
        ("kda/api.py", "from perilune.native import isa\nfrom .gates import gate\nfrom . import portable\n"),
        ("model/decoder.py", "from perilune.kda import chunk_kda\nfrom ..moe.router import route\n"),
        ("rl/rollout.py", "from perilune.serve.client import Client\nfrom perilune.serve import client\nimport perilune.serve.client\n"),
        ("demo.py", "import perilune.sandbox\nimport perilune.rl\nfrom perilune.bench import BENCHES\n"),
        ("cli.py", "import perilune\nfrom perilune.demo import run\n"),
        ("serve/api.py", "import importlib\nimportlib.import_module(name)\n"),
    ],
)
def test_an_import_in_the_right_direction_is_let_through(tmp_path: Path, file: str, text: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert violations(tmp_path) == []
