"""Plots of load runs, as SVG. Needs matplotlib, which the extra `bench` brings."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polysilicon.bench.metrics import METRICS, concurrency, latencies, tokens_per_second
from polysilicon.bench.serve import Result

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_SIZE = (4.2, 2.8)
_BINS = 40


def draw(width: int, plots: Sequence[tuple[str, Callable[[Axes], None]]]) -> bytes:
    """An SVG of titled plots, `width` in a row."""
    with matplotlib.rc_context(_STYLE):
        height = -(-len(plots) // width)
        figure = Figure(figsize=(_SIZE[0] * width, _SIZE[1] * height), layout="constrained")
        grid = figure.subplots(height, width, squeeze=False).flat
        for axes, (title, plot) in zip(grid, plots, strict=False):
            plot(axes)
            axes.set_title(title, fontsize=10, loc="left")
        for axes in list(grid)[len(plots) :]:
            axes.remove()
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return svg.getvalue()


def latency_against_load(results: Sequence[Result]) -> bytes:
    """Latencies, throughput and goodput of several runs over their request rates."""
    rates = [float(result.figures["request_rate"]) for result in results]

    def lines(*curves: tuple[str, str], unit: str) -> Callable[[Axes], None]:
        def plot(axes: Axes) -> None:
            for label, name in curves:
                values = [result.figures[name] for result in results]
                if None not in values:
                    axes.plot(rates, values, marker="o", markersize=4, label=label)
            axes.set_xlabel("offered load (req/s)")
            axes.set_ylabel(unit)
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False)

        return plot

    plots = [
        (
            label,
            lines(
                *((what, f"{what}_{name}_ms") for what in ("median", "p90", "p99")),
                unit="ms",
            ),
        )
        for name, label in METRICS.items()
    ]
    completed = (("completed", "request_throughput"), ("good", "request_goodput"))
    plots.append(("Requests", lines(*completed, unit="req/s")))
    plots.append(("Output tokens", lines(("output", "output_throughput"), unit="tokens/s")))
    return draw(3, plots)


def histograms(result: Result) -> bytes:
    """How each latency is distributed."""

    def histogram(values: Sequence[float]) -> Callable[[Axes], None]:
        def plot(axes: Axes) -> None:
            axes.hist(values, bins=_BINS)
            axes.set_xlabel("ms")
            axes.set_xlim(left=0)

        return plot

    of_run = latencies(result.run.records)
    return draw(4, [(label, histogram(of_run[name])) for name, label in METRICS.items()])


def timelines(result: Result) -> bytes:
    """Tokens, requests and latencies over the run's time."""
    completed = [record for record in result.run.records if record.failure is None]
    failed = [record for record in result.run.records if record.failure is not None]
    start = min(record.sent for record in result.run.records)

    def tokens(axes: Axes) -> None:
        axes.stairs(tokens_per_second(completed), fill=True, alpha=0.6)
        axes.set_ylabel("tokens/s")

    def requests(axes: Axes) -> None:
        steps = concurrency(completed)
        times, counts = [at for at, _ in steps], [count for _, count in steps]
        axes.step(times, counts, where="post")
        axes.vlines(
            [record.sent - start for record in failed],
            *(0, 1),
            transform=axes.get_xaxis_transform(),
            color="tab:red",
            linewidth=0.8,
            rasterized=True,
        )
        axes.set_ylabel("requests")

    def scatter(values: Sequence[float | None]) -> Callable[[Axes], None]:
        def plot(axes: Axes) -> None:
            points = [
                (record.sent - start, value * 1e3)
                for record, value in zip(completed, values, strict=True)
                if value is not None
            ]
            # As pixels: an SVG of ten thousand circles would be slow to show.
            axes.plot(*zip(*points, strict=True), ".", markersize=5, rasterized=True)
            axes.set_ylabel("ms")
            axes.set_ylim(bottom=0)

        return plot if any(value is not None for value in values) else lambda axes: None

    plots = [
        ("Output tokens", tokens),
        ("Requests under way (red: a failed one is sent)", requests),
        ("TTFT by time of sending", scatter([record.ttft for record in completed])),
        ("TPOT by time of sending", scatter([record.tpot for record in completed])),
    ]

    def over_time(plot: Callable[[Axes], None]) -> Callable[[Axes], None]:
        def timed(axes: Axes) -> None:
            plot(axes)
            axes.set_xlabel("s")
            axes.set_xlim(left=0)

        return timed

    return draw(2, [(title, over_time(plot)) for title, plot in plots])
