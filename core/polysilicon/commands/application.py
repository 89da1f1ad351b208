"""Which command stands in which file, and how errors are shown."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from polysilicon.commands.backends import backends
from polysilicon.commands.bench import bench
from polysilicon.commands.chat import chat
from polysilicon.commands.eval import evaluate
from polysilicon.commands.lines import generate, score, tokenize
from polysilicon.commands.plan import plan
from polysilicon.commands.plugins import plugins
from polysilicon.commands.pull import pull
from polysilicon.commands.quantize import quantize
from polysilicon.commands.run import run as run_prompt
from polysilicon.commands.serve import serve
from polysilicon.commands.tune import tune
from polysilicon.errors import ConfigError, PolysiliconError

# typer carries click's classes inside and exports the subclass only.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="One LLM server for every vendor's silicon.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        try:
            print(importlib.metadata.version("polysilicon"))
        except importlib.metadata.PackageNotFoundError:
            print("not installed")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("run")(run_prompt)
app.command()(chat)
app.command()(serve)
app.command()(pull)
app.command()(quantize)
app.command()(tokenize)
app.command()(score)
app.command()(generate)
app.command("eval")(evaluate)
app.add_typer(bench, name="bench")
app.command()(plan)
app.command()(plugins)
app.command()(backends)
app.command()(tune)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status: 0; 1 after an error; 2 for wrong usage; 130 after
    an interrupt. Errors that are meant for users are one line on stderr."""
    try:
        status = app(list(arguments), prog_name="polysilicon", standalone_mode=False)
        sys.stdout.flush()
    except PolysiliconError as error:
        return _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except _USAGE_ERROR as error:
        return _fail(error.format_message(), 2)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}", 1)
    return status if isinstance(status, int) else 0


def _drop_output() -> None:
    """Nobody takes our output any more: what is still buffered must not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status
