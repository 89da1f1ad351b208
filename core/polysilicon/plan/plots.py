"""Plots of plans, as SVG. Needs matplotlib, which the extra `bench` brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from polysilicon.bench.plots import draw
from polysilicon.plan.planner import MOST_SEQUENCES, Plan, Speed, most_sequences
from polysilicon.plan.tables import label

_POINTS = 8


def memory(plans: Sequence[Plan]) -> bytes:
    """What each plan takes of its accelerator's memory, item by item."""

    def plot(axes: Axes) -> None:
        places = list(range(len(plans)))
        left = [0.0] * len(plans)
        for name, shares in _items(plans).items():
            axes.barh(places, shares, left=left, label=name)
            left = [start + width for start, width in zip(left, shares, strict=True)]
        axes.axvline(100, color="black", linewidth=1)
        axes.set_yticks(places, [label(plan) for plan in plans])
        axes.invert_yaxis()
        axes.set_xlabel("% of the memory")
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))

    return draw(1, [("Memory", plot)])


def _items(plans: Sequence[Plan]) -> dict[str, list[float]]:
    """Percents of the memory that each plan takes, by item."""

    def shares(nbytes: Callable[[Plan], int]) -> list[float]:
        return [100 * nbytes(plan) / plan.hardware.memory.value for plan in plans]

    items = {"weights": shares(lambda plan: plan.bill.weights)}
    for group in plans[0].bill.kv:
        items[f"KV, {group}"] = shares(lambda plan, group=group: plan.bill.kv[group])  # type: ignore[misc]
    items["adapters"] = shares(lambda plan: plan.bill.adapters)
    items["workspace"] = shares(lambda plan: plan.bill.workspace)
    return {name: found for name, found in items.items() if any(found)}


def against_load(plans: Sequence[Plan]) -> bytes:
    """Decode rates over concurrency, TTFT over prompts, and what fits over the context."""
    load = plans[0].load
    speeds = [Speed(plan.model, plan.hardware, plan.load) for plan in plans]
    streams = _powers(1, min(MOST_SEQUENCES, max(64, 4 * load.concurrency)))
    prompts = _powers(16, plans[0].model.config.max_length)

    def decode(index: int, streams: int) -> float | None:
        return speeds[index].decode_rate(concurrency=streams, context=load.context)

    def per_stream(index: int, streams: int) -> float | None:
        rate = decode(index, streams)
        return rate / streams if rate is not None else None

    def ttft(index: int, tokens: int) -> float | None:
        return speeds[index].prefill_seconds(tokens)

    def fitting(index: int, context: int) -> float | None:
        plan = plans[index]
        return (
            most_sequences(plan.model, plan.hardware, dataclasses.replace(load, context=context))
            or None
        )

    def lines(
        value: Callable[[int, int], float | None], points: Sequence[int], x: str, y: str
    ) -> Callable[[Axes], None]:
        def plot(axes: Axes) -> None:
            for index, plan in enumerate(plans):
                found = [(point, value(index, point)) for point in points]
                known = [(point, figure) for point, figure in found if figure is not None]
                if known:
                    curve = zip(*known, strict=True)
                    axes.plot(*curve, "o-", color=f"C{index}", markersize=3, label=label(plan))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            if axes.lines:
                axes.legend(frameon=False, fontsize=7)

        return plot

    at = f"at {load.context:,} tokens"
    return draw(
        2,
        [
            (f"Decode {at}, at most", lines(decode, streams, "streams", "tokens/s")),
            (f"Of each stream {at}", lines(per_stream, streams, "streams", "tokens/s")),
            ("TTFT alone, at least", lines(ttft, prompts, "prompt tokens", "s")),
            ("Sequences that fit", lines(fitting, prompts, "context", "sequences")),
        ],
    )


def _powers(first: int, last: int) -> list[int]:
    """Up to `_POINTS` powers of two, evenly spread from `first` to `last`, which they end with."""
    powers = [first]
    while powers[-1] * 2 <= last:
        powers.append(powers[-1] * 2)
    step = -(-len(powers) // _POINTS)
    return sorted({*powers[::step], last})
