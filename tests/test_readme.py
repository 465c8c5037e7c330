"""What the README shows runs, and what it points to exists."""

import asyncio
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    heads, dim = 2, 16
    names = {x: torch.randn(1, 20, heads, dim) for x in "qkvg"}
    names |= {"beta": torch.rand(1, 20, heads), "A_log": torch.zeros(heads), "dt_bias": torch.zeros(heads * dim)}
    exec(blocks[0], names)
    assert names["o"].shape == (1, 20, heads, dim) and names["state"].shape == (1, heads, dim, dim)
    golden = {"ids": torch.arange(3, 25)}
    exec(blocks[1].replace("DIR", str(ROOT / "tests/golden/k3-tiny")), golden)
    assert golden["logits"].shape == (22, 256)


def test_the_python_of_the_serving_guide_runs():
    guide = (ROOT / "docs/guides/serving.md").read_text(encoding="utf-8")
    openai_client, engine_client = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    compile(openai_client, "guide", "exec")  # tests/serve/api/test_openai_client.py runs its like
    names: dict[str, object] = {}
    exec(engine_client.replace("DIR", str(ROOT / "tests/golden/k3-tiny")), names)
    ids, logprobs, experts = asyncio.run(names["main"]((5, 6, 7), 1))
    assert len(ids) == len(logprobs) > 0 and experts.shape == (3 + len(ids) - 1, 8, 2)


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.name)
def test_the_files_a_document_names_exist(path):
    document = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http)([^)#]+)\)", document)
    named = re.findall(r"`((?:perilune|tests|docs|tools)/[\w./-]+)`", document) + re.findall(r"tests/[\w/]+\.py", document)
    missing = [name for name in links if not (path.parent / name).exists()] + [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_its_commands_are_commands():
    commands = set(re.findall(r"perilune (\w+)", README)) - {"is", "works"}
    from perilune.cli import app

    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {c for c in commands if not c.startswith("_")} <= known
    targets = set(re.findall(r"`?make (\w+)`?", README)) - {"is"}
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
