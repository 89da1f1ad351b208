"""`polysilicon bench`: how fast the engine is under a made load, offline or behind a server."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from polysilicon import progress
from polysilicon.bench.latency import measure_latency
from polysilicon.bench.throughput import Load, measure
from polysilicon.commands.bench_serve import serve
from polysilicon.commands.options import configured
from polysilicon.commands.output import print_json, print_table
from polysilicon.commands.session import ENGINE_FIELDS, session
from polysilicon.config import Config
from polysilicon.engine.loading import Loaded
from polysilicon.errors import ConfigError

bench = typer.Typer(help="Measure the engine under made loads.", no_args_is_help=True)

Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Catalogue name, path or hf:owner/repo[:file]."),
]
_PromptTokens = Annotated[str, typer.Option(help="Tokens of each prompt; several as 128,512.")]
_OutputTokens = Annotated[str, typer.Option(help="Tokens generated for each; several as 32,64.")]
_Batch = Annotated[str, typer.Option(help="Sequences at once; several as 1,8,32.")]
_SharedPrefix = Annotated[
    int, typer.Option(min=0, help="Tokens that all prompts of a batch begin with.")
]
_Seed = Annotated[int, typer.Option(min=0, help="Of the random tokens.")]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, a list where there are several loads.")
]


@bench.callback()
def _bench() -> None:
    """Measure the engine under made loads."""


@bench.command()
@configured(ENGINE_FIELDS)
def throughput(
    config: Config,
    model: Model = None,
    prompt_tokens: _PromptTokens = "512",
    output_tokens: _OutputTokens = "64",
    batch: _Batch = "32",
    shared_prefix: _SharedPrefix = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs; medians are printed.")] = 3,
    seed: _Seed = 0,
    as_json: _AsJson = False,
) -> None:
    """Prefill and decode tokens/s of one batch, offline."""

    def figures(loaded: Loaded, load: Load, tick: progress.Tick) -> Mapping[str, float]:
        return dataclasses.asdict(
            measure(loaded.client, loaded.engine, load, repeats=repeats, seed=seed, tick=tick)
        )

    loads = _loads(prompt_tokens, output_tokens, batch, shared_prefix)
    columns = ("prefill_tokens_per_s", "decode_tokens_per_s", "step_ms", "core_ms_per_step")
    _measure_loads(config, model, loads, repeats, figures, columns, as_json)


@bench.command()
@configured(ENGINE_FIELDS)
def latency(
    config: Config,
    model: Model = None,
    prompt_tokens: _PromptTokens = "512",
    output_tokens: _OutputTokens = "64",
    batch: _Batch = "1",
    shared_prefix: _SharedPrefix = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Batches measured.")] = 10,
    seed: _Seed = 0,
    as_json: _AsJson = False,
) -> None:
    """TTFT, TPOT and their percentiles of one stream or batch, offline."""

    def figures(loaded: Loaded, load: Load, tick: progress.Tick) -> Mapping[str, float]:
        return measure_latency(
            loaded.client, loaded.engine, load, repeats=repeats, seed=seed, tick=tick
        )

    loads = _loads(prompt_tokens, output_tokens, batch, shared_prefix)
    latencies = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    columns = (*latencies, "prefill_tokens_per_s", "decode_tokens_per_s")
    _measure_loads(config, model, loads, repeats, figures, columns, as_json)


def _measure_loads(
    config: Config,
    model: str | None,
    loads: Sequence[Load],
    repeats: int,
    figures: Callable[[Loaded, Load, progress.Tick], Mapping[str, float]],
    columns: Sequence[str],
    as_json: bool,
) -> None:
    """Run the loads on one engine and print a row each."""
    measured: list[dict[str, Any]] = []
    with (
        session(config, model) as loaded,
        # One run of each load comes before those that are counted.
        progress.pieces("runs", len(loads) * (repeats + 1)) as tick,
    ):
        for load in loads:
            measured.append(dataclasses.asdict(load) | dict(figures(loaded, load, tick)))
    if as_json:
        print_json(measured[0] if len(measured) == 1 else measured)
        return
    names = [field.name for field in dataclasses.fields(Load)]
    rows = [
        (*(str(row[name]) for name in names), *(f"{row[name]:,.2f}" for name in columns))
        for row in measured
    ]
    print_table((*names, *columns), rows)


def _loads(prompt_tokens: str, output_tokens: str, batch: str, shared_prefix: int) -> list[Load]:
    """Every combination of the lists."""
    lists = (
        _numbers("--batch", batch),
        _numbers("--prompt-tokens", prompt_tokens),
        _numbers("--output-tokens", output_tokens),
    )
    return [
        Load(prompt_tokens=prompt, output_tokens=output, batch=size, shared_prefix=shared_prefix)
        for size, prompt, output in itertools.product(*lists)
    ]


def _numbers(flag: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 31 for part in parts):
        raise ConfigError(f"{flag} takes a number above 0, or several as 8,32, not {text!r}")
    return [int(part) for part in parts]


bench.command()(serve)
