"""A million small random products and attentions of the CPU backend against float64.

    python ci/cpu_random.py

Four of five cases are products (cpu_random_products.py), one is a step of attention of several
sequences (cpu_random_attention.py), at every instruction-set level that runs here. Ends with an
error that names the case at the first result out of bounds. A million take about half an hour on
two cores that have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed

import cpu_random_attention
import cpu_random_products

KINDS: dict[str, Callable[[int, int, float], int]] = {
    "products": cpu_random_products.run,
    "attention": cpu_random_attention.run,
}
PARTS = {"products": 4000, "attention": 1000}
"""Cases of each kind that a process checks before it reports."""


def check(kind: str, count: int, seed: int) -> int:
    """How many cases were checked. Raises a RuntimeError that says how to repeat what failed."""
    try:
        return KINDS[kind](count, seed, float("inf"))
    except (cpu_random_products.WrongResult, cpu_random_attention.WrongResult) as error:
        raise RuntimeError(f"{error} (ci/cpu_random_{kind}.py --seed {seed})") from None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    began, done, shown = time.monotonic(), dict.fromkeys(KINDS, 0), 0
    parts = max(1, round(arguments.cases / sum(PARTS.values())))
    with ProcessPoolExecutor(arguments.jobs) as pool:
        running = {
            pool.submit(check, kind, PARTS[kind], arguments.seed + part): kind
            for part in range(parts)
            for kind in KINDS
        }
        for future in as_completed(running):
            try:
                done[running[future]] += future.result()
            except RuntimeError as error:
                pool.shutdown(wait=False, cancel_futures=True)
                sys.exit(f"wrong: {error}")
            if sum(done.values()) >= shown + 10_000:
                shown = sum(done.values())
                print(f"{shown:,} cases in {time.monotonic() - began:,.0f} s", flush=True)
    found = " and ".join(f"{count:,} random {kind}" for kind, count in done.items())
    print(f"{found} cases within their bounds (seed {arguments.seed})")


if __name__ == "__main__":
    main()
