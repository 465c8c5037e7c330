"""The `perilune` command: one thin function per subcommand; the work, and every heavy import, lives elsewhere.

To add a command, add a function under "Commands" that imports its room inside the function and calls one thing in it, so that
`perilune --help` stays fast. A mistake of the user is raised as `UserError`: `main` prints it as one sentence and exits with status 2.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

import perilune
from perilune.errors import UserError

app = typer.Typer(
    help=f"{perilune.__doc__}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point. Exit status: 0, 1 for a bug (with its traceback), 2 for a mistake of the user, 130 after Ctrl-C."""
    try:
        app(prog_name="perilune")
    except UserError as error:
        print(f"perilune: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"perilune {perilune.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


# Commands, in the order of the help page.


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False) -> None:
    """What this machine offers, what is missing, and the command that installs it."""
    from rich.console import Console

    from perilune.doctor import dumps, examine, show

    checks = examine()
    if as_json:
        print(dumps(checks))
    else:
        show(checks, Console())


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help="The benchmark, or 'all'.")] = None,
    list_benches: Annotated[bool, typer.Option("--list", help="Name the benchmarks and what they measure.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes and fewer runs: shows that it works, not how fast.")] = False,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Also write the report there; '-' = stdout. With 'all': a directory.")
    ] = None,
    earlier: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Reprint a report of this commit instead of measuring.")
    ] = None,
) -> None:
    """Run the benchmarks behind the published figures, each against its baseline."""
    from perilune.bench.command import list_all, run_benches

    if list_benches or name is None:
        list_all()
    else:
        run_benches(name, quick=quick, json_path=json_path, earlier=earlier)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(metavar="PRESET|CONFIG|DIR", help="A preset (kimi-k3, …), a config.json, or a Hub directory.")],
    tokens: Annotated[int | None, typer.Option(min=1, help="Context of one request; the model's longest by default.")] = None,
) -> None:
    """What a model costs: parameters, memory per token and request, hybrid against all-MLA."""
    from rich.console import Console

    from perilune.model.plan import show_plan

    show_plan(model, tokens, Console())


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe that ships with Perilune, or a TOML file.")],
    out: Annotated[Path | None, typer.Option(help="Directory of the run; runs/RECIPE by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in that directory from its last checkpoint.")] = False,
) -> None:
    """Train a model by a recipe. Under `torchrun … -m perilune train` the ranks share each step's batch."""
    from perilune.train.recipe import load_recipe
    from perilune.train.run import train as run

    run(load_recipe(recipe), out or Path("runs") / Path(recipe).stem, resume=resume)


@app.command()
def serve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A Hub directory: config.json, weights, tokenizer.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What requests call the model; the directory's name by default.")] = None,
    max_sequences: Annotated[int, typer.Option(help="Requests that run at once; more wait.")] = 16,
    max_length: Annotated[int | None, typer.Option(help="Tokens of the longest sequence, prompt included.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Threads of the engine; one for a small model by default.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="PERILUNE_API_KEY", help="Demand this key; better given in the environment, which ps does not show."),
    ] = None,
) -> None:
    """Serve a model to OpenAI clients: chat, completions, and a token endpoint for RL."""
    from perilune.serve.command import serve as run
    from perilune.serve.launch import LaunchOptions

    run(LaunchOptions(directory, name, dtype, max_sequences, max_length, threads), host=host, port=port, api_key=api_key)


@app.command()
def chat(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A Hub directory: config.json, weights, tokenizer.")],
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    effort: Annotated[str, typer.Option(help="How much a K3 model thinks: low, high, max, or none.")] = "max",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this probability.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of the longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of the longest conversation.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Threads of the engine; one for a small model by default.")] = None,
) -> None:
    """Talk to a model in the terminal."""
    from perilune.serve.command import converse
    from perilune.serve.generation import SamplingParams
    from perilune.serve.launch import LaunchOptions

    sampling = SamplingParams(max_tokens, temperature, top_p, seed=seed)
    options = LaunchOptions(directory, None, dtype, max_sequences=1, max_length=max_length, threads=threads)
    converse(options, system=system, effort=effort, sampling=sampling)
