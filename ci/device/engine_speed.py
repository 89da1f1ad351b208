"""Decode, prefill and the first token behind a cached prefix, through the whole engine."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time

import numpy as np
import random_model
import torch
from measuring import Record, arguments, open_device, torch_device

from polysilicon.backend import Device
from polysilicon.config import Config
from polysilicon.engine.engine import Engine
from polysilicon.engine.loading import build_engine
from polysilicon.models.config import ModelConfig
from polysilicon.models.model import Model
from polysilicon.request import Request, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens. suffix: what follows a cached prefix. steps: decode steps that are timed."""

    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 1024
    prompts: tuple[int, ...] = (2048, 16384)
    suffix: int = 64
    steps: int = 64
    step_tokens: int = 8192
    max_length: int = 20480
    kv_memory: str = "24GiB"


DRY = Sizes(
    batches=(1, 3),
    context=20,
    prompts=(48, 96),
    suffix=8,
    steps=4,
    step_tokens=64,
    max_length=256,
    kv_memory="4MiB",
)
WARM_STEPS = 12
"""Steps before the timed ones, in which kernels are compiled and graphs captured."""


class Bench:
    """An engine of a model, and requests of random tokens."""

    def __init__(self, device: Device, model: Model, sizes: Sizes) -> None:
        config = Config(
            step_tokens=sizes.step_tokens,
            max_sequences=max(sizes.batches),
            max_length=sizes.max_length,
            kv_memory=sizes.kv_memory,  # type: ignore[arg-type]
        )
        self.engine: Engine
        self.engine, _ = build_engine(config, device, model, identity="random", eos_ids=frozenset())
        self._vocabulary = model.config.vocab_size
        self._random = np.random.default_rng(5)
        self._names = itertools.count()

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(0, self._vocabulary, count).tolist())

    def add(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        name = str(next(self._names))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add(Request(id=name, prompt=prompt, params=params))
        return name

    def first_token(self, prompt: tuple[int, ...]) -> float:
        """Seconds from a request to its first token, on an engine with nothing else to do."""
        begin = time.perf_counter()
        self.add(prompt, 1)
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - begin

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Seconds of a decode step of `batch` sequences with about `context` tokens each."""
        room = 4 * (WARM_STEPS + steps)
        names = {self.add(self.tokens(context), room) for _ in range(batch)}
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step()}
        for _ in range(WARM_STEPS):
            self.engine.step()
        done, begin = self.engine.counts.steps, time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        seconds = time.perf_counter() - begin
        done = self.engine.counts.steps - done
        for name in names:
            self.engine.cancel(name)
        while self.engine.has_work:
            self.engine.step()
        return seconds / done


def kv_bytes(config: ModelConfig, tokens: int) -> int:
    """Of keys and values in bf16."""
    return tokens * config.layers * 2 * config.kv_heads * config.head_dim * 2


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Of the products with the layers' weights, and of causal attention."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    weights = hidden * (query + 2 * key) + query * hidden + 3 * hidden * inner
    return config.layers * (2 * weights * tokens + 2 * query * tokens * tokens)


def profile(bench: Bench, batch: int, context: int) -> list[dict[str, object]]:
    """The kernels that take the most time in decode steps: share of the device's time, and
    microseconds a step."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    steps = 8
    names = {bench.add(bench.tokens(context), 200) for _ in range(batch)}
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in bench.engine.step()}
    for _ in range(WARM_STEPS):
        bench.engine.step()
    with torch.profiler.profile(activities=activities) as profiled:
        for _ in range(steps):
            bench.engine.step()
        torch.cuda.synchronize()
    for name in names:
        bench.engine.cancel(name)
    while bench.engine.has_work:
        bench.engine.step()
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) or 1
    return [
        {
            "kernel": event.key[:60],
            "share": round(event.self_device_time_total / total, 3),
            "us": round(event.self_device_time_total / steps, 1),
        }
        for event in events[:14]
    ]


def main() -> int:
    chosen = arguments()
    sizes = DRY if chosen.dry else Sizes()
    record = Record(chosen.out)
    begin = time.perf_counter()
    device = open_device(chosen.dry)
    model, weight_bytes = random_model.build(device, chosen.weights, tiny=chosen.dry)
    bench = Bench(device, model, sizes)
    config = model.config
    with record.case(case="load", weights=chosen.weights) as figures:
        figures |= {
            "seconds": time.perf_counter() - begin,
            "weight_bytes": weight_bytes,
            "memory": dict(device.memory().used),
        }
    for batch in sizes.batches:
        with record.case(case="decode", weights=chosen.weights, batch=batch) as figures:
            seconds = bench.decode(batch, sizes.context, sizes.steps)
            length = sizes.context + WARM_STEPS + sizes.steps // 2
            figures |= {
                "context": length,
                "ms": 1e3 * seconds,
                "tokens_per_s": batch / seconds,
                "bytes_per_s": (weight_bytes + kv_bytes(config, batch * length)) / seconds,
            }
    for prompt in sizes.prompts:
        with record.case(case="prefill", weights=chosen.weights, prompt=prompt) as figures:
            bench.first_token(bench.tokens(prompt))
            seconds = min(bench.first_token(bench.tokens(prompt)) for _ in range(2))
            figures |= {
                "ms": 1e3 * seconds,
                "tokens_per_s": prompt / seconds,
                "flops_per_s": prefill_flops(config, prompt) / seconds,
            }
    longest = max(sizes.prompts)
    with record.case(case="cached_prefix", weights=chosen.weights, prompt=longest) as figures:
        prefix = bench.tokens(longest)
        bench.first_token(prefix)
        runs = [bench.first_token(prefix + bench.tokens(sizes.suffix)) for _ in range(3)]
        figures |= {"suffix": sizes.suffix, "ms": 1e3 * min(runs)}
    with record.case(case="engine", weights=chosen.weights) as figures:
        counts = bench.engine.counts
        figures |= {
            "core_ms_per_step": 1e3 * counts.core_seconds / counts.steps,
            "memory": dict(device.memory().used),
        }
    if torch_device(chosen.dry).type == "cuda":
        for batch in (sizes.batches[0], sizes.batches[-1]):
            with record.case(case="profile", weights=chosen.weights, batch=batch) as figures:
                figures["kernels"] = profile(bench, batch, sizes.context)
    device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
