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
    """One row a figure, one column a plan. backends: what they declare, by name."""
    load = plans[0].load
    streams = {1: _rate_of("stream_rate"), load.concurrency: _rate_of("batch_rate")}
    figures: list[tuple[str, _Cell]] = [
        ("Weights", lambda plan: size(plan.bill.weights)),
        *((f"KV, {spec.name}", _kv_of(spec.name)) for spec in plans[0].specs),
        ("Adapters", lambda plan: size(plan.bill.adapters) if plan.bill.adapters else ""),
        ("Workspace, about", lambda plan: size(plan.bill.workspace)),
        ("Together", lambda plan: size(plan.bill.total)),
        ("Memory", lambda plan: size(plan.hardware.memory.value)),
        ("Fits", _fits),
        (
            "Log-probabilities of prompts, up to, beside",
            lambda plan: size(plan.bill.prompt_logits),
        ),
        (
            f"Longest context of {_counted(load.concurrency, 'sequence')}",
            lambda plan: f"{plan.most_context:,}" if plan.most_context else "none",
        ),
        (
            f"Most sequences of {load.context:,} tokens",
            lambda plan: f"{plan.most_sequences:,}" if plan.most_sequences else "none",
        ),
        ("Bandwidth", _bandwidth),
        ("Products", _products),
        *(
            (f"Decode, {_counted(n, 'stream')} at {load.context:,} tokens, at most", cell)
            for n, cell in streams.items()
        ),
        (f"Prefill of {load.input_tokens:,} tokens, at most", _rate_of("prefill_rate")),
        ("TTFT, at least", lambda plan: _known(plan.ttft, duration)),
        ("TPOT, at least", lambda plan: _known(plan.tpot, duration)),
        (
            f"E2E of {load.output_tokens:,} output tokens, at least",
            lambda plan: _known(plan.end_to_end, duration),
        ),
        ("Dollars a million input tokens, at least", _dollars_of("input_cost")),
        ("Dollars a million output tokens, at least", _dollars_of("output_cost")),
        ("Backends", lambda plan: described(plan.model, backends)),
    ]
    table = [(name, *(cell(plan) for plan in plans)) for name, cell in figures]
    return [row for row in table if any(row[1:])]


_Cell = Callable[[Plan], str]


def _known(value: float | None, show: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else show(value)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _kv_of(group: str) -> _Cell:
    return lambda plan: size(plan.bill.kv[group])


def _rate_of(field: str) -> _Cell:
    def show(rate: float) -> str:
        return f"{rate:,.0f} tok/s" if rate >= 10 else f"{rate:,.2f} tok/s"

    return lambda plan: _known(getattr(plan, field), show)


def _dollars_of(field: str) -> _Cell:
    """Nothing where no price was given."""
    return lambda plan: (
        "" if plan.price is None else _known(getattr(plan, field), lambda cost: f"{cost:,.4f}")
    )


def _bandwidth(plan: Plan) -> str:
    return UNKNOWN if plan.bandwidth is None else f"{plan.bandwidth.value / 1e9:,.0f} GB/s"


def _fits(plan: Plan) -> str:
    over = plan.bill.total - plan.hardware.memory.value
    return "yes" if over <= 0 else f"no, {size(over)} too much"


def _products(plan: Plan) -> str:
    if plan.products is None:
        return UNKNOWN
    dtype, rate = plan.products
    return f"{dtype}, {rate.value / 1e12:,.4g} Top/s"


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
        "prompt_logits_bytes": plan.bill.prompt_logits,
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
