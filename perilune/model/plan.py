"""`perilune plan`: the footprint of a model as tables."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from perilune.model.config import ModelConfig
from perilune.model.footprint import Footprint, flops_per_token, footprint
from perilune.model.hub_config import read_config
from perilune.model.presets import PRESETS, preset


def find_config(model: str) -> ModelConfig:
    """The configuration that a preset's name, a config.json or a Hub directory stands for."""
    path = Path(model)
    return read_config(path) if model not in PRESETS and path.exists() else preset(model)


def show_plan(model: str, tokens: int | None, console: Console) -> None:
    """Print the plan of a model for requests of `tokens` (its longest context by default)."""
    config = find_config(model)
    cost = footprint(config)
    context = tokens or config.max_position_embeddings
    console.print(_parameters(model, config, cost, context))
    console.print(_memory(cost, context))


def _parameters(model: str, config: ModelConfig, cost: Footprint, context: int) -> Table:
    table = Table(title=model, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("layers", f"{config.num_layers} ({len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA)")
    table.add_row("experts", f"{config.num_experts}, {config.num_experts_per_token} per token")
    table.add_row("parameters, total", short_count(cost.total_parameters))
    table.add_row("parameters, active per token", short_count(cost.active_parameters))
    table.add_row(f"decode, FLOPs per token at {context:,} tokens", short_count(flops_per_token(config, cost, context)))
    return table


def _memory(cost: Footprint, context: int) -> Table:
    table = Table(title="cache of one request")
    table.add_column("")
    for name in ("hybrid, bf16 states", "hybrid, fp32 states", "all MLA"):
        table.add_column(name, justify="right")
    fp32_extra = cost.state_bytes_fp32 - cost.state_bytes
    table.add_row("fixed per request", _mib(cost.state_bytes), _mib(cost.state_bytes_fp32), "0")
    table.add_row("per token", *(f"{n:,} B" for n in (cost.bytes_per_token, cost.bytes_per_token, cost.all_mla_bytes_per_token)))
    whole = cost.request_bytes(context)
    table.add_row(f"at {context:,} tokens", *(_mib(n) for n in (whole, whole + fp32_extra, cost.all_mla_request_bytes(context))))
    table.add_row("cheaper than all MLA from", f"{cost.crossover_tokens:,} tokens", f"{cost.crossover_tokens_fp32:,} tokens", "")
    return table


def short_count(number: int) -> str:
    """Three or four significant digits with the field's suffix: 2.78T, 104.2B, 3.11B."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{suffix}" if number >= 100 * size else f"{number / size:.2f}{suffix}"
    return str(number)


def _mib(number: int) -> str:
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.2f} MiB"
