"""`polysilicon bench`: how fast the engine is under a made load."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from polysilicon.bench.throughput import Load, measure
from polysilicon.commands.bench_serve import serve
from polysilicon.commands.options import configured
from polysilicon.commands.output import print_json, print_table
from polysilicon.commands.session import ENGINE_FIELDS, session
from polysilicon.config import Config

bench = typer.Typer(help="Measure the engine under made loads.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure the engine under made loads."""


@bench.command()
@configured(ENGINE_FIELDS)
def throughput(
    config: Config,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Catalogue name, path or hf:owner/repo[:file]."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for each.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 32,
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts begin with.")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs; medians are printed.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the random tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill and decode tokens/s of one batch, offline."""
    load = Load(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        batch=batch,
        shared_prefix=shared_prefix,
    )
    with session(config, model) as loaded:
        result = measure(loaded.client, loaded.engine, load, repeats=repeats, seed=seed)
    figures = dataclasses.asdict(load) | dataclasses.asdict(result)
    if as_json:
        print_json(figures)
    else:
        rows = [
            (name, f"{value:,.2f}" if isinstance(value, float) else str(value))
            for name, value in figures.items()
        ]
        print_table(("figure", "value"), rows)


bench.command()(serve)
