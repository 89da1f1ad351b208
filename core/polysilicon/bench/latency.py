"""Offline latency: what each request of one batch waits for, through the engine that serves."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping

import numpy as np

from polysilicon.bench.metrics import distribution
from polysilicon.bench.throughput import Load, check_fits, draw_prompts, fixed_length_requests
from polysilicon.engine.client import Client
from polysilicon.engine.engine import Engine
from polysilicon.progress import Tick, no_tick


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """Seconds of one batch since it was submitted: of each request's first and last token."""

    first: list[float]
    last: list[float]


def measure_latency(
    client: Client,
    engine: Engine,
    load: Load,
    *,
    repeats: int,
    seed: int,
    tick: Tick = no_tick,
) -> Mapping[str, float]:
    """Submit the load's requests at once, `repeats` times after one that is not counted, with fresh
    tokens and an empty prefix cache each time.

    TTFT, TPOT and E2EL over all requests of all repeats, in ms, by the names of `distribution`.
    prefill_tokens_per_s: prompt tokens over the time to the last request's first token;
    decode_tokens_per_s: tokens after that moment over the time from then to the end; both medians
    over repeats. tick: called after each of the repeats + 1 batches. Raises ConfigError as
    `check_fits` does.
    """
    check_fits(load, engine)
    random = np.random.default_rng(seed)
    batches = []
    rates = []
    for repeat in range(repeats + 1):
        engine.kv.reset()
        prompts = draw_prompts(random, load, engine)
        batch, decoded = _run(client, prompts, load, f"latency-{repeat}")
        if repeat:
            batches.append(batch)
            prefill = load.batch * load.prompt_tokens / max(batch.first)
            rates.append((prefill, decoded / (max(batch.last) - max(batch.first))))
        tick()
    pairs = [
        (first, last)
        for batch in batches
        for first, last in zip(batch.first, batch.last, strict=True)
    ]
    values = {
        "ttft": [first for first, _ in pairs],
        "tpot": [(last - first) / (load.output_tokens - 1) for first, last in pairs],
        "e2el": [last for _, last in pairs],
    }
    figures: dict[str, float] = {}
    for name, seconds in values.items():
        figures |= distribution(name, [value * 1e3 for value in seconds])
    figures["prefill_tokens_per_s"] = statistics.median(prefill for prefill, _ in rates)
    figures["decode_tokens_per_s"] = statistics.median(decode for _, decode in rates)
    return figures


def _run(
    client: Client, prompts: list[tuple[int, ...]], load: Load, name: str
) -> tuple[_Batch, int]:
    """The times of a batch, and how many tokens came after every request had its first."""
    requests = fixed_length_requests(prompts, name, load.output_tokens)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    decoded = 0
    began = time.perf_counter()
    for request in requests:
        client.submit(request)
    while client.has_work:
        complete = len(first) == len(requests)
        outputs = client.poll()
        now = time.perf_counter() - began
        for output in outputs:
            if output.ids:
                first.setdefault(output.request_id, now)
                last[output.request_id] = now
                decoded += len(output.ids) if complete else 0
    batch = _Batch(
        first=[first[request.id] for request in requests],
        last=[last[request.id] for request in requests],
    )
    return batch, decoded
