"""`polysilicon plan`: what a model needs, and how fast it can be at most, before it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polysilicon.commands.options import configured
from polysilicon.config import Config

if TYPE_CHECKING:
    from polysilicon.backend import Capabilities
    from polysilicon.plan.hardware import Hardware
    from polysilicon.plugins import Plugins

_FIELDS = frozenset(
    {"kv_dtype", "page_size", "step_tokens", "backend", "device", "backend_option", "block_plugins"}
)
_PAGE_SIZE = 16
_KV_DTYPE = "bf16"
_LOAD, _WHERE = "Load", "Hardware"
_MOST_TOKENS = 2**31 - 1


@configured(_FIELDS)
def plan(
    config: Config,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="GGUF file, directory with a config.json, that file, hf:owner/repo, of which no "
            "weight is fetched, or a name of the catalogue.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the longest sequence. Default: 8192, or what the model has.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Sequences at once.", rich_help_panel=_LOAD)
    ] = 32,
    input_tokens: Annotated[
        int | None,
        typer.Option(help="Of a request. Default: what fills the context.", rich_help_panel=_LOAD),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            help="Of a request. Default: 512, at most half of the context.", rich_help_panel=_LOAD
        ),
    ] = None,
    adapters: Annotated[
        int, typer.Option(min=0, max=1 << 16, help="LoRA adapters held.", rich_help_panel=_LOAD)
    ] = 0,
    adapter_rank: Annotated[
        int, typer.Option(min=1, max=1 << 12, help="Their rank.", rich_help_panel=_LOAD)
    ] = 16,
    hardware: Annotated[
        str,
        typer.Option(
            help="Accelerator by name, such as h100, or this, which is measured; several as "
            "h100,mi300x.",
            rich_help_panel=_WHERE,
        ),
    ] = "this",
    quantize: Annotated[
        str | None,
        typer.Option(
            help="w4, w8, fp8, or none for weights as they are stored; several as none,w4. "
            "Default: none.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="Dollars an hour of the hardware, or one for each of several as 2.5,4.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="File for a page with plots.")] = None,
) -> None:
    """What a model takes of memory, what fits, and ceilings of its speed and cost, from its
    config.json or GGUF header alone: side by side for several accelerators and quantisations."""
    from polysilicon.commands.output import print_json, print_table, write_file
    from polysilicon.errors import ConfigError
    from polysilicon.plan import planner, tables
    from polysilicon.plan.model import NONE, open_model, quantized
    from polysilicon.plan.placed import placed
    from polysilicon.plugins import load_plugins
    from polysilicon.progress import bar

    if html is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--html needs matplotlib: pip install 'polysilicon[bench]'")
    plugins = load_plugins(config.block_plugins)
    names = _listed("--hardware", hardware)
    prices = _prices(price, names)
    with contextlib.ExitStack() as held:
        places = [_hardware(name, config, plugins, held) for name in names]
        planned = open_model(
            model or config.model,
            architectures_added=plugins.architectures,
            formats_added=plugins.checkpoint_formats,
            progress=bar,
        )
        load = planner.load_for(
            planned,
            context=config.max_length if context is None else context,
            concurrency=concurrency,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            kv_dtype=config.kv_dtype or _KV_DTYPE,
            page_size=config.page_size or _PAGE_SIZE,
            step_tokens=config.step_tokens,
            adapters=adapters,
            adapter_rank=adapter_rank,
        )
        schemes = _listed("--quantize", config.quantize or NONE if quantize is None else quantize)
        variants = [(scheme, placed(quantized(planned, scheme))) for scheme in schemes]
        plans = [
            planner.plan(variant, scheme, place, load, price=cost)
            for place, cost in zip(places, prices, strict=True)
            for scheme, variant in variants
        ]
        backends = _backends(plugins)
        if html is not None:
            from polysilicon.plan.report import render

            write_file(html, render(plans, backends))
    if as_json:
        print_json(tables.as_json(plans, backends))
        return
    print(tables.summary(plans[0]))
    print_table(("", *map(tables.label, plans)), tables.rows(plans, backends))
    for note in tables.notes(plans):
        print(f"polysilicon: {note}", file=sys.stderr)


def _hardware(name: str, config: Config, plugins: Plugins, held: contextlib.ExitStack) -> Hardware:
    from polysilicon.plan.hardware import THIS, find_hardware
    from polysilicon.plan.measured import this_machine

    if name == THIS:
        return held.enter_context(this_machine(config, plugins))
    return find_hardware(name)


def _backends(plugins: Plugins) -> dict[str, Capabilities]:
    """What backends declare, by name: those that can run here by their devices, others by what
    their lane last reported."""
    from polysilicon.errors import PluginError
    from polysilicon.lane_reports import declared, kept_reports
    from polysilicon.selection import BackendStatus, capabilities, probe_all

    found = {}
    for report in probe_all(plugins):
        if report.status is BackendStatus.AVAILABLE:
            with contextlib.suppress(PluginError):
                found[report.name] = capabilities(report)
    reported = {name: declared(report) for name, report in kept_reports().items()}
    others = {name: said for name, said in reported.items() if said is not None}
    return found | {name: said for name, said in others.items() if name not in found}


def _listed(flag: str, text: str) -> list[str]:
    """The different parts of a list with commas."""
    from polysilicon.errors import ConfigError

    parts = list(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    if not all(parts):
        raise ConfigError(f"{flag} takes a name, or several as a,b, not {text!r:.80}")
    return parts


def _prices(text: str | None, names: list[str]) -> list[float | None]:
    """One price for each accelerator."""
    from polysilicon.errors import ConfigError

    if text is None:
        return [None] * len(names)
    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) not in (1, len(names)) or not all(0 < price < 1e9 for price in prices):
        raise ConfigError(
            f"--price takes dollars an hour, one or as many as --hardware has names "
            f"({len(names)}), not {text!r:.80}"
        )
    return [*prices] * (len(names) if len(prices) == 1 else 1)
