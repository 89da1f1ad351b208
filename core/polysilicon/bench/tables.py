"""The figures of runs as rows for people to read."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon.bench.metrics import METRICS, failures
from polysilicon.bench.serve import Result

_FIGURES = (
    ("Completed requests", "completed", ",.0f"),
    ("Failed requests", "failed", ",.0f"),
    ("Not sent", "not_sent", ",.0f"),
    ("Duration (s)", "duration", ",.2f"),
    ("Input tokens", "total_input_tokens", ",.0f"),
    ("  of them cached", "total_cached_tokens", ",.0f"),
    ("Output tokens", "total_output_tokens", ",.0f"),
    ("Request throughput (req/s)", "request_throughput", ",.2f"),
    ("Request goodput (req/s)", "request_goodput", ",.2f"),
    ("Output throughput (tok/s)", "output_throughput", ",.2f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ",.2f"),
    ("Peak output tokens in a second", "max_output_tokens_per_s", ",.0f"),
    ("Peak concurrent requests", "max_concurrent_requests", ",.0f"),
    *(
        (f"{label} {statistic} (ms)", f"{statistic}_{name}_ms", ",.2f")
        for name, label in METRICS.items()
        for statistic in ("mean", "median", "p90", "p99")
    ),
    ("Latest send after its time (ms)", "max_send_delay_ms", ",.2f"),
    ("Load generator's CPU (s)", "client_cpu_seconds", ",.2f"),
)

_ALWAYS = ("completed", "failed")


def load_of(result: Result) -> str:
    """The load of a run in few words, such as `2 req/s`."""
    figures = result.figures
    if figures["arrivals"] == "ramp-up":
        return f"{figures['ramp_up_start_rps']:g} to {figures['ramp_up_end_rps']:g} req/s"
    if figures["arrivals"] == "rate":
        return f"{figures['request_rate']:g} req/s"
    return str(figures["arrivals"])


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row a figure, one column a run, for the figures that any run has."""
    table = []
    for label, name, form in _FIGURES:
        values = [result.figures[name] for result in results]
        if any(values) or name in _ALWAYS or (name == "request_goodput" and None not in values):
            cells = ("" if value is None else format(value, form) for value in values)
            table.append((label, *cells))
    return table


def remarks(results: Sequence[Result]) -> list[str]:
    """Sentences on what the figures do not say: failures by cause, runs cut short."""
    said = []
    for result in results:
        load = load_of(result)
        if result.run.ended is not None:
            said.append(f"{load}: ended early: {result.run.ended}")
        for cause, (count, message) in failures(result.run.records).items():
            said.append(f"{load}: {count} failed: {cause}: {message}")
        if result.figures["completed"] and result.figures["tokens_counted_by"] == "events":
            said.append(
                f"{load}: the server sends no usage, so that output tokens are counted as one for "
                "each event of a stream, and input tokens are those asked for"
            )
    return said
