"""`perilune plan`: what a model costs, printed."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from perilune import cli
from perilune.errors import UserError
from perilune.model.footprint import footprint
from perilune.model.hub import save_model
from perilune.model.hub_config import config_to_json
from perilune.model.plan import find_config, show_plan
from perilune.model.presets import PRESETS, kimi_k3, preset
from tests.model.tiny_models import k3_config, kimi_linear_config, random_model


def plan_of(model: str, tokens: int | None = None) -> dict[str, list[str]]:
    """The printed rows by their first cell; the title of the first table under ''."""
    printed = io.StringIO()
    show_plan(model, tokens, Console(file=printed, width=160))
    lines = printed.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return {"": [lines[0].strip()]} | {row[0]: row[1:] for row in rows}


def test_kimi_k3_costs_what_its_report_says() -> None:
    rows = plan_of("kimi-k3")
    assert rows[""] == ["kimi-k3"]
    assert rows["layers"] == ["93 (69 KDA, 24 MLA)"] and rows["experts"] == ["896, 16 per token"]
    assert rows["parameters, total"] == ["2.78T"]
    assert rows["parameters, active per token"] == ["104.2B"]
    assert rows["fixed per request"] == ["221.55 MiB", "428.55 MiB", "0"]
    assert rows["per token"][:2] == ["27,648 B", "27,648 B"]
    assert rows["cheaper than all MLA from"][:2] == ["2,923 tokens", "5,653 tokens"]
    assert f"at {kimi_k3().max_position_embeddings:,} tokens" in rows


def test_the_context_is_the_one_asked_for() -> None:
    rows = plan_of("kimi-linear-48b-a3b", tokens=1000)
    cost = footprint(preset("kimi-linear-48b-a3b"))
    hybrid, fp32, all_mla = (float(cell.removesuffix(" MiB")) * 2**20 for cell in rows["at 1,000 tokens"])
    assert hybrid == pytest.approx(cost.state_bytes + 1000 * cost.bytes_per_token, abs=6000)
    assert fp32 == pytest.approx(cost.state_bytes_fp32 + 1000 * cost.bytes_per_token, abs=6000)
    assert all_mla == pytest.approx(1000 * cost.all_mla_bytes_per_token, abs=6000)
    assert "decode, FLOPs per token at 1,000 tokens" in rows


def test_a_config_file_and_a_hub_directory_stand_for_their_model(tmp_path: Path) -> None:
    config = k3_config()
    (tmp_path / "mine.json").write_text(json.dumps(config_to_json(config, "float32")))
    model = random_model(config, torch.float32)
    save_model(model, tmp_path / "model")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for place in (tmp_path / "mine.json", tmp_path / "model", tmp_path / "model" / "config.json"):
        assert find_config(str(place)) == config
        assert plan_of(str(place))["parameters, total"] == [f"{parameters / 1000:.2f}K"]


@pytest.mark.parametrize("attention", [("kda",), ("mla",)])
def test_models_of_one_kind_of_layer_have_a_plan_too(tmp_path: Path, attention: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_json(kimi_linear_config(attention=attention * 3), "float32")))
    rows = plan_of(str(tmp_path))
    assert rows["per token"][0] == ("0 B" if attention == ("kda",) else rows["per token"][2])
    assert rows["fixed per request"][0] == ("0.00 MiB" if attention == ("mla",) else rows["fixed per request"][0])


def test_a_preset_wins_over_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k3-tiny").mkdir()
    assert find_config("k3-tiny") == preset("k3-tiny")


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["perilune", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_the_command_prints_the_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run_command(monkeypatch, "plan", "k3-tiny", "--tokens", "2000") == 0
    assert "at 2,000 tokens" in capsys.readouterr().out


def test_an_unknown_name_is_one_sentence_that_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "plan", "kimi-k9") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "'kimi-k9'" in printed.err and all(name in printed.err for name in PRESETS)


def test_a_folder_without_a_config_and_a_context_of_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        show_plan(str(tmp_path), None, Console())
    assert run_command(monkeypatch, "plan", "k3-tiny", "--tokens", "0") == 2
    assert "--tokens" in capsys.readouterr().err
