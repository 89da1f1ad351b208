"""Plans as rows and objects for people and programs to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polysilicon.backend import Capabilities
from polysilicon.plan.hardware import Figure
from polysilicon.plan.planner import Plan
from polysilicon.plan.support import described, support
from polysilicon.plan.units import duration, size

UNKNOWN = "unknown"


def label(plan: Plan) -> str:
    """What tells a plan from those beside it."""
    return f"{plan.hardware.key}, {plan.quantization}"


def summary(plan: Plan) -> str:
    """The model in a sentence."""
    model, load = plan.model, plan.load
    kv = ", ".join(f"{size(spec.token_bytes)} in {spec.name}" for spec in plan.specs)
    return (
        f"{model.name} ({model.config.architecture}): {model.parameters:,} parameters, "
        f"{model.config.layers} layers, context {model.config.max_length:,}; "
        f"KV of a token in {load.kv_dtype}: {kv}"
    )


def rows(plans: Sequence[Plan], backends: Mapping[str, Capabilities]) -> list[tuple[str, ...]]:
    """One row a figure, one column a plan. backends: capabilities of those at hand, by name."""
    load = plans[0].load
    many = f"{load.concurrency:,} streams at {load.context:,} tokens"

    def row(name: str, cell: Callable[[Plan], str | None]) -> tuple[str, ...] | None:
        cells = [cell(plan) for plan in plans]
        return (name, *(c or "" for c in cells)) if any(cells) else None

    def known(value: float | None, show: Callable[[float], str]) -> str:
        return UNKNOWN if value is None else show(value)

    def rate(value: float | None) -> str:
        return known(value, lambda v: f"{v:,.0f} tok/s" if v >= 10 else f"{v:,.2f} tok/s")

    groups = [spec.name for spec in plans[0].specs]
    found = [
        row("Weights", lambda plan: size(plan.bill.weights)),
        *(
            row(f"KV, {group}", lambda plan, group=group: size(plan.bill.kv[group]))  # type: ignore[misc]
            for group in groups
        ),
        row("Adapters", lambda plan: size(plan.bill.adapters) if plan.bill.adapters else None),
        row("Workspace, about", lambda plan: size(plan.bill.workspace)),
        row("Together", lambda plan: size(plan.bill.total)),
        row("Memory", lambda plan: size(plan.hardware.memory.value)),
        row("Fits", _fits),
        row(
            f"Longest context of {load.concurrency:,} sequences",
            lambda plan: f"{plan.most_context:,}" if plan.most_context else "none",
        ),
        row(
            f"Most sequences of {load.context:,} tokens",
            lambda plan: f"{plan.most_sequences:,}" if plan.most_sequences else "none",
        ),
        row(
            "Bandwidth",
            lambda plan: known(_value(plan.bandwidth), lambda v: f"{v / 1e9:,.0f} GB/s"),
        ),
        row("Products", _products),
        row(
            f"Decode, 1 stream at {load.context:,} tokens, at most",
            lambda plan: rate(plan.stream_rate),
        ),
        row(f"Decode, {many}, at most", lambda plan: rate(plan.batch_rate)),
        row(
            f"Prefill of {load.input_tokens:,} tokens, at most",
            lambda plan: rate(plan.prefill_rate),
        ),
        row("TTFT, at least", lambda plan: known(plan.ttft, duration)),
        row("TPOT, at least", lambda plan: known(plan.tpot, duration)),
        row(
            f"E2E of {load.output_tokens:,} output tokens, at least",
            lambda plan: known(plan.end_to_end, duration),
        ),
        row(
            "Dollars a million input tokens, at least", lambda plan: _dollars(plan, plan.input_cost)
        ),
        row(
            "Dollars a million output tokens, at least",
            lambda plan: _dollars(plan, plan.output_cost),
        ),
        row("Backends here", lambda plan: described(plan.model, backends)),
    ]
    return [item for item in found if item is not None]


def _fits(plan: Plan) -> str:
    over = plan.bill.total - plan.hardware.memory.value
    return "yes" if over <= 0 else f"no, {size(over)} too much"


def _products(plan: Plan) -> str:
    if plan.products is None:
        return UNKNOWN
    dtype, rate = plan.products
    return f"{dtype}, {rate.value / 1e12:,.4g} Top/s"


def _dollars(plan: Plan, cost: float | None) -> str | None:
    if plan.price is None:
        return None
    return UNKNOWN if cost is None else f"{cost:,.4f}"


def notes(plans: Sequence[Plan]) -> list[str]:
    """What was taken for granted, and what the figures leave out."""
    said = {note: None for plan in plans for note in plan.model.notes}
    return list(said)


def sources(plans: Sequence[Plan]) -> dict[str, dict[str, str]]:
    """Where each figure of each accelerator is from."""
    found: dict[str, dict[str, str]] = {}
    for plan in plans:
        hardware = plan.hardware
        entry = found.setdefault(hardware.key, {"name": hardware.name})
        entry["memory"] = hardware.memory.source
        if plan.bandwidth is not None:
            entry["bandwidth"] = plan.bandwidth.source
        if plan.products is not None:
            dtype, rate = plan.products
            entry[f"{dtype} products"] = rate.source
    return found


def as_json(plans: Sequence[Plan], backends: Mapping[str, Capabilities]) -> dict[str, Any]:
    """Everything, in bytes, seconds, tokens a second and dollars."""
    model, load = plans[0].model, plans[0].load
    return {
        "model": model.name,
        "architecture": model.config.architecture,
        "parameters": model.parameters,
        "max_length": model.config.max_length,
        "load": dataclasses.asdict(load),
        "kv_token_bytes": {spec.name: spec.token_bytes for spec in plans[0].specs},
        "plans": [_entry(plan, backends) for plan in plans],
    }


def _entry(plan: Plan, backends: Mapping[str, Capabilities]) -> dict[str, Any]:
    def figure(value: Figure | None) -> dict[str, Any] | None:
        return None if value is None else dataclasses.asdict(value)

    products = None
    if plan.products is not None:
        products = {"dtype": plan.products[0], **dataclasses.asdict(plan.products[1])}
    return {
        "hardware": plan.hardware.key,
        "hardware_name": plan.hardware.name,
        "quantize": plan.quantization,
        "weights_bytes": plan.bill.weights,
        "kv_bytes": dict(plan.bill.kv),
        "adapters_bytes": plan.bill.adapters,
        "workspace_bytes": plan.bill.workspace,
        "total_bytes": plan.bill.total,
        "memory": figure(plan.hardware.memory),
        "fits": plan.fits,
        "most_context": plan.most_context,
        "most_sequences": plan.most_sequences,
        "bandwidth": figure(plan.bandwidth),
        "products": products,
        "decode_stream_tokens_per_s": plan.stream_rate,
        "decode_batch_tokens_per_s": plan.batch_rate,
        "prefill_tokens_per_s": plan.prefill_rate,
        "ttft_s": plan.ttft,
        "tpot_s": plan.tpot,
        "e2e_s": plan.end_to_end,
        "price_per_hour": plan.price,
        "input_dollars_per_million": plan.input_cost,
        "output_dollars_per_million": plan.output_cost,
        "encodings": support(plan.model, backends),
        "notes": list(plan.model.notes),
    }


def _value(figure: Figure | None) -> float | None:
    return None if figure is None else figure.value
