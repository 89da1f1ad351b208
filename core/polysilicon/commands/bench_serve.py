"""`polysilicon bench serve`: load on a server, any that speaks OpenAI's HTTP."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from polysilicon.bench.arrivals import RampUp
from polysilicon.bench.metrics import parse_goodput
from polysilicon.bench.settings import Settings, normalise
from polysilicon.bench.workloads import (
    Item,
    mooncake_trace,
    random_prompts,
    sharegpt_prompts,
)
from polysilicon.errors import ConfigError

_LOAD, _PROMPTS, _ARRIVAL, _OUTPUT = "Server", "Workload", "Arrival", "Output"
_MAX_TOKENS = 1 << 24


def serve(
    url: Annotated[
        str,
        typer.Option(help="Of the server, such as http://127.0.0.1:8000.", rich_help_panel=_LOAD),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Name to ask for; the first the server lists.", rich_help_panel=_LOAD),
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(rich_help_panel=_LOAD)
    ] = "completions",
    prompts: Annotated[
        Literal["auto", "ids", "text"],
        typer.Option(
            help="How synthetic prompts are sent; auto: as token ids where the server takes them.",
            rich_help_panel=_LOAD,
        ),
    ] = "auto",
    vocab_size: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Token ids lie below it; what the server says, or else 32000.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent as bearer token.", envvar="OPENAI_API_KEY", rich_help_panel=_LOAD),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE sent with each request; may be repeated.", rich_help_panel=_LOAD
        ),
    ] = None,
    extra_body: Annotated[
        str, typer.Option(help="JSON object put over each request's.", rich_help_panel=_LOAD)
    ] = "{}",
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds of a request.", rich_help_panel=_LOAD)
    ] = 600.0,
    sharegpt: Annotated[
        Path | None,
        typer.Option(
            help="Prompts from a JSON or JSONL file of conversations.", rich_help_panel=_PROMPTS
        ),
    ] = None,
    mooncake: Annotated[
        Path | None,
        typer.Option(
            help="Times, lengths and shared prefixes from a Mooncake trace (JSONL).",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Requests of a run: 100, or a whole trace.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            min=1, max=_MAX_TOKENS, help="Of each random prompt.", rich_help_panel=_PROMPTS
        ),
    ] = 512,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MAX_TOKENS,
            help="Asked of each: 64 for random prompts, as recorded for conversations.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    range_ratio: Annotated[
        float,
        typer.Option(
            help="Random lengths are uniform within +- this share; 0: fixed.",
            rich_help_panel=_PROMPTS,
        ),
    ] = 0.0,
    shared_prefix: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens of a random prompt's common beginning.", rich_help_panel=_PROMPTS
        ),
    ] = 0,
    num_prefixes: Annotated[
        int, typer.Option(min=1, help="Different common beginnings.", rich_help_panel=_PROMPTS)
    ] = 1,
    length_scale: Annotated[
        float,
        typer.Option(
            help="A trace's lengths are multiplied by it, shared blocks alike.",
            rich_help_panel=_PROMPTS,
        ),
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of prompts and arrivals. A prefix cache knows a seed's prompts once it has seen "
            "them.",
            rich_help_panel=_PROMPTS,
        ),
    ] = 0,
    request_rate: Annotated[
        str | None,
        typer.Option(
            help="Requests per second, or several as 1,2,4, one run each; inf, the default: all at "
            "once. A trace has times of its own.",
            rich_help_panel=_ARRIVAL,
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of intervals; 1 is Poisson, less is burstier.",
            rich_help_panel=_ARRIVAL,
        ),
    ] = 1.0,
    speed: Annotated[
        float,
        typer.Option(help="A trace's times run so much faster.", rich_help_panel=_ARRIVAL),
    ] = 1.0,
    ramp_up: Annotated[
        Literal["linear", "exponential"] | None,
        typer.Option(
            "--ramp-up-strategy",
            help="The rate grows from --ramp-up-start-rps to --ramp-up-end-rps.",
            rich_help_panel=_ARRIVAL,
        ),
    ] = None,
    ramp_up_start_rps: Annotated[float | None, typer.Option(rich_help_panel=_ARRIVAL)] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option(rich_help_panel=_ARRIVAL)] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests under way.", rich_help_panel=_ARRIVAL),
    ] = None,
    num_warmups: Annotated[
        int,
        typer.Option(
            min=0, help="Requests before the first run, not counted.", rich_help_panel=_ARRIVAL
        ),
    ] = 1,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Bounds in ms that a good request keeps: ttft:300 tpot:50 e2el:5000.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="[BOUND]...", help="More of --goodput.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)
    ] = False,
    result: Annotated[
        Path | None,
        typer.Option(help="File to write the JSON to.", rich_help_panel=_OUTPUT),
    ] = None,
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed",
            help="Put every request's times into the JSON.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="HTML file to write tables and plots to.", rich_help_panel=_OUTPUT),
    ] = None,
) -> None:
    """TTFT, TPOT, throughput and goodput of a server under load.

    The JSON has the names of `vllm bench serve`; it is a list where several rates are given. Ctrl-C
    ends the run and reports what was measured so far.
    """
    if more_goodput and not goodput:
        raise ConfigError(f"unexpected argument {more_goodput[0]!r}")
    _check_outputs(result, report)
    if report is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--report needs matplotlib: pip install 'polysilicon[bench]'")
    if num_prompts is None and mooncake is None:
        num_prompts = 100
    workload, items = _workload(
        sharegpt=sharegpt,
        mooncake=mooncake,
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        range_ratio=range_ratio,
        shared_prefix=shared_prefix,
        num_prefixes=num_prefixes,
        length_scale=length_scale,
        speed=speed,
        seed=seed,
    )
    ramp = _ramp_up(ramp_up, ramp_up_start_rps, ramp_up_end_rps)
    if not 0 < burstiness < float("inf"):
        raise ConfigError("--burstiness must be above 0")
    headers = _headers(header or [])
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    settings = Settings(
        url=normalise(url),
        model=model,
        endpoint=endpoint,
        prompt_form=prompts,
        vocab_size=vocab_size,
        headers=headers,
        extra=_json_object(extra_body),
        timeout=timeout,
        workload=workload,
        items=items,
        rates=_rates(request_rate, ramp, has_times=mooncake is not None),
        burstiness=burstiness,
        ramp_up=ramp,
        max_concurrency=max_concurrency,
        warm_ups=num_warmups,
        goodput=parse_goodput([*(goodput or ()), *(more_goodput or ())]),
        seed=seed,
    )
    from polysilicon.commands.bench_load import run_load

    run_load(settings, as_json=as_json, result=result, detail=save_detailed, report=report)


def _workload(
    *,
    sharegpt: Path | None,
    mooncake: Path | None,
    num_prompts: int | None,
    prompt_tokens: int,
    output_tokens: int | None,
    range_ratio: float,
    shared_prefix: int,
    num_prefixes: int,
    length_scale: float,
    speed: float,
    seed: int,
) -> tuple[str, list[Item]]:
    """The workload in few words, and its items."""
    if sharegpt is not None and mooncake is not None:
        raise ConfigError("--sharegpt and --mooncake are two workloads: give one")
    if not 0 < length_scale <= 16 or not 0 < speed < float("inf"):
        raise ConfigError("--length-scale must lie between 0 and 16, and --speed be above 0")
    if mooncake is not None:
        items = mooncake_trace(
            mooncake, count=num_prompts, length_scale=length_scale, speed=speed, seed=seed
        )
        return f"{mooncake.name}, lengths x{length_scale:g}, speed x{speed:g}", items
    assert num_prompts is not None
    if sharegpt is not None:
        items = sharegpt_prompts(
            sharegpt, count=num_prompts, output_tokens=output_tokens, seed=seed
        )
        return sharegpt.name, items
    output_tokens = output_tokens or 64
    items = random_prompts(
        count=num_prompts,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        range_ratio=range_ratio,
        shared_prefix=shared_prefix,
        num_prefixes=num_prefixes,
        seed=seed,
    )
    spread = f" +-{range_ratio:.0%}" if range_ratio else ""
    prefix = f", of {num_prefixes} prefixes of {shared_prefix}" if shared_prefix else ""
    return f"random {prompt_tokens} in, {output_tokens} out{spread}{prefix}", items


def _rates(text: str | None, ramp_up: RampUp | None, *, has_times: bool) -> list[float | None]:
    if text is not None and ramp_up is not None:
        raise ConfigError("--request-rate and --ramp-up-strategy are two ways to send: give one")
    if text is None:
        return [None] if has_times and ramp_up is None else [math.inf]
    rates: list[float | None] = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not rate > 0:
            raise ConfigError(
                f"--request-rate takes requests per second, such as 2, 0.5,1,2 or inf, not {text!r}"
            )
        rates.append(rate)
    return rates


def _ramp_up(
    strategy: Literal["linear", "exponential"] | None, start: float | None, end: float | None
) -> RampUp | None:
    if strategy is None and start is None and end is None:
        return None
    if strategy is None or start is None or end is None or not (start > 0 and 0 < end < math.inf):
        raise ConfigError(
            "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together, with rates "
            "above 0"
        )
    return RampUp(strategy=strategy, start_rps=start, end_rps=end)


def _headers(texts: Sequence[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if (
            not equals
            or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name)
            or not value.isprintable()
        ):
            raise ConfigError(f"--header takes NAME=VALUE, not {text!r}")
        headers[name] = value
    return headers


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body takes a JSON object, not {text!r}")
    return value


def _check_outputs(*paths: Path | None) -> None:
    """Say before the run what could not be written after it."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"{path} cannot be written: name a file in a directory that exists")
