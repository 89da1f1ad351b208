"""Offline throughput: prefill and decode apart, through the engine that serves."""

from __future__ import annotations

import dataclasses
import statistics
import time

import numpy as np

from polysilicon.engine.client import Client
from polysilicon.engine.engine import Engine
from polysilicon.errors import ConfigError
from polysilicon.progress import Tick, no_tick
from polysilicon.request import Request, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """batch sequences at once, each of prompt_tokens random tokens, the first shared_prefix of them
    common to all, and output_tokens generated tokens, at least 2."""

    prompt_tokens: int
    output_tokens: int
    batch: int
    shared_prefix: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """Medians over repeats. step_ms: a decode step of the whole batch; core_ms_per_step: the core's
    own share of it (scheduling, KV bookkeeping, the batch's arrays)."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    step_ms: float
    core_ms_per_step: float


def check_fits(load: Load, engine: Engine) -> None:
    """Raises ConfigError when a load is none, or does not fit the engine's context or number of
    sequences."""
    if load.output_tokens < 2:
        raise ConfigError("--output-tokens must be at least 2: decoding begins with the second")
    if load.shared_prefix >= load.prompt_tokens:
        raise ConfigError("--shared-prefix must be shorter than --prompt-tokens")
    if load.prompt_tokens + load.output_tokens > engine.max_length:
        raise ConfigError(
            f"{load.prompt_tokens} + {load.output_tokens} tokens exceed the context of "
            f"{engine.max_length}: raise --max-length or --kv-memory"
        )
    if load.batch > engine.executor.max_sequences:
        raise ConfigError(f"a batch of {load.batch} needs --max-sequences {load.batch}")


def draw_prompts(random: np.random.Generator, load: Load, engine: Engine) -> list[tuple[int, ...]]:
    """Prompts of a load, of any ids of the vocabulary."""
    prompts = random.integers(0, engine.executor.vocab_size, (load.batch, load.prompt_tokens))
    prompts[:, : load.shared_prefix] = prompts[0, : load.shared_prefix]
    return [tuple(prompt.tolist()) for prompt in prompts]


def fixed_length_requests(
    prompts: list[tuple[int, ...]], name: str, max_tokens: int
) -> list[Request]:
    """Greedy requests that end after max_tokens exactly; ids are `name-0` and so on."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(id=f"{name}-{index}", prompt=prompt, params=params)
        for index, prompt in enumerate(prompts)
    ]


def measure(
    client: Client,
    engine: Engine,
    load: Load,
    *,
    repeats: int,
    seed: int,
    tick: Tick = no_tick,
) -> Throughput:
    """Run the load `repeats` times, after one run that is not counted, with fresh tokens each.

    Prefill is timed on requests that end with their first token. The same prompts then decode
    behind their cached KV, from the moment when every sequence has its first token. tick: called
    after each of the repeats + 1 runs. Raises ConfigError as `check_fits` does.
    """
    check_fits(load, engine)
    random = np.random.default_rng(seed)
    runs = []
    for repeat in range(repeats + 1):
        engine.kv.reset()
        prompts = draw_prompts(random, load, engine)
        prefill = _prefill(client, engine, prompts, f"prefill-{repeat}")
        runs.append((prefill, *_decode(client, engine, prompts, load, f"decode-{repeat}")))
        tick()
    columns = zip(*runs[1:], strict=True)
    return Throughput(**dict(zip(_FIELDS, map(statistics.median, columns), strict=True)))


_FIELDS = tuple(field.name for field in dataclasses.fields(Throughput))


def _prefill(client: Client, engine: Engine, prompts: list[tuple[int, ...]], name: str) -> float:
    computed = engine.counts.prompt_tokens
    began = time.perf_counter()
    for _ in client.generate(fixed_length_requests(prompts, name, 1)):
        pass
    seconds = time.perf_counter() - began
    return (engine.counts.prompt_tokens - computed) / seconds


def _decode(
    client: Client, engine: Engine, prompts: list[tuple[int, ...]], load: Load, name: str
) -> tuple[float, float, float]:
    waiting = {(f"{name}-{index}", 0) for index in range(len(prompts))}
    began = steps = core = tokens = 0.0
    for request in fixed_length_requests(prompts, name, load.output_tokens):
        client.submit(request)
    while client.has_work:
        outputs = client.poll()
        if not waiting:
            tokens += sum(len(output.ids) for output in outputs)
            continue
        waiting -= {(output.request_id, output.choice) for output in outputs}
        if not waiting:
            began, steps = time.perf_counter(), engine.counts.steps
            core = engine.counts.core_seconds
    seconds = time.perf_counter() - began
    steps = engine.counts.steps - steps
    return (
        tokens / seconds,
        seconds / steps * 1e3,
        (engine.counts.core_seconds - core) / steps * 1e3,
    )
