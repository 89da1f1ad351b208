"""What the KV manager costs a step, and what matching a very long prompt costs.

Times are medians of processor time, so that a busy machine does not spoil them, with the garbage
collector off (the KV manager leaves no cycles behind):
`python ci/bench/kv_manager.py [--json]`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from statistics import median
from time import process_time

import numpy as np

from polysilicon.kv import GroupSpec, KVManager, SequenceKV

MODELS: dict[str, tuple[int | None, ...]] = {"full": (None,), "hybrid": (None, 512)}
PAGE_SIZE = 16


def manager(windows: tuple[int | None, ...], *, sequences: int, length: int) -> KVManager:
    pages = sequences * (length // PAGE_SIZE + 2) + 1
    return KVManager(
        groups=[GroupSpec(name=f"{window}", pages=pages, window=window) for window in windows],
        page_size=PAGE_SIZE,
        max_sequences=sequences,
        max_length=length + PAGE_SIZE,
    )


def opened(kv: KVManager, tokens: np.ndarray | list[int]) -> SequenceKV:
    sequence = kv.open(tokens, b"root")
    assert sequence is not None, "the benchmark's pool is large enough"
    return sequence


def milliseconds(call: Callable[[], object]) -> float:
    start = process_time()
    call()
    return (process_time() - start) * 1000


def decode(
    windows: tuple[int | None, ...], *, sequences: int, prompt: int, steps: int
) -> list[float]:
    """Milliseconds of each of `steps` decoding steps, one step ahead, the cache full before."""
    kv = manager(windows, sequences=sequences, length=prompt + steps)
    generator = np.random.default_rng(0)
    for _ in range(2):
        tokens = [generator.integers(0, 50_000, prompt).tolist() for _ in range(sequences)]
        running = [opened(kv, known) for known in tokens]
        for index, (sequence, known) in enumerate(zip(running, tokens, strict=True)):
            # Staggered, so that page borders come spread over the steps as they do in service.
            del known[prompt - index % PAGE_SIZE :]
            assert kv.grow(sequence, len(known)), "the benchmark's pool is large enough"
            kv.step_ended(kv.step_submitted())
            kv.commit(sequence, known, len(known))
        times = []
        for _ in range(steps):
            for known in tokens:
                known.append(7)
            start = process_time()
            for sequence, known in zip(running, tokens, strict=True):
                kv.grow(sequence, len(known))
            step = kv.step_submitted()
            if step > kv.steps.ended + 1:
                kv.step_ended(step - 1)
            for sequence, known in zip(running, tokens, strict=True):
                kv.commit(sequence, known, len(known))
            times.append((process_time() - start) * 1000)
        kv.step_ended(kv.steps.submitted)
        for sequence, known in zip(running, tokens, strict=True):
            kv.close(sequence, known, len(known))
    return times


def lives(windows: tuple[int | None, ...], *, length: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of the calls in the life of a sequence of `length` tokens, cached before."""
    kv = manager(windows, sequences=2, length=length)
    tokens = np.random.default_rng(1).integers(0, 50_000, length).astype(np.int32)
    cold = opened(kv, tokens)
    times: dict[str, list[float]] = {"grow": [], "commit": [], "open": [], "close": []}
    times["grow"].append(milliseconds(lambda: kv.grow(cold, length)))
    kv.step_ended(kv.step_submitted())
    times["commit"].append(milliseconds(lambda: kv.commit(cold, tokens, length)))
    kv.close(cold, tokens, length)
    for _ in range(repeats):
        start = process_time()
        sequence = opened(kv, tokens)
        times["open"].append((process_time() - start) * 1000)
        assert sequence.num_cached_tokens == length - 1, "the prompt is cached"
        kv.step_ended(kv.step_submitted())
        start = process_time()
        kv.close(sequence, tokens, length - 1)
        times["close"].append((process_time() - start) * 1000)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64, help="decoding sequences (64)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of their prompts (1024)")
    parser.add_argument("--steps", type=int, default=512, help="decoding steps (512)")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    arguments = parser.parse_args()
    if min(arguments.sequences, arguments.steps) < 1 or arguments.prompt < PAGE_SIZE:
        parser.error(f"--sequences and --steps must be at least 1, --prompt at least {PAGE_SIZE}")

    gc.disable()
    report: dict[str, dict[str, float]] = {}
    for name, windows in MODELS.items():
        times = decode(
            windows,
            sequences=arguments.sequences,
            prompt=arguments.prompt,
            steps=arguments.steps,
        )
        figures = {"step": median(times), "step, 99th percentile": float(np.percentile(times, 99))}
        for length in (arguments.prompt, 131_072):
            for call, values in lives(windows, length=length, repeats=9).items():
                figures[f"{call} of {length} tokens"] = median(values)
        report[name] = figures
    if arguments.json:
        print(
            json.dumps(
                {"unit": "ms of processor time", "sequences": arguments.sequences, "models": report}
            )
        )
        return 0
    print(f"milliseconds of processor time; a step is {arguments.sequences} sequences decoding")
    print(f"{'':28}" + "".join(f"{name:>10}" for name in report))
    for row in report["full"]:
        print(f"{row:28}" + "".join(f"{figures[row]:10.3f}" for figures in report.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
