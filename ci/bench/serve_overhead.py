"""What HTTP and the second process cost: a served load against the same load offline, in pairs.

    python ci/bench/serve_overhead.py MODEL --backend cpu --streams 32 --pairs 5 --json out.json

Decoding: `bench throughput` runs a batch offline; a server of its own runs the same number of
streams for `bench serve`. Both decode behind cached prompts, and both rates are those of the time
in which every stream runs: from the last first token to the first last token. The credited ratio
first takes the load generator's own CPU seconds, spread over the cores, out of the served time.
TTFT: single requests one after another, `bench serve` against `bench latency`, prompts not cached.
The sides alternate, the idle one waits; the first request of each kind is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polysilicon.testing.served import POLYSILICON, serving


def call(*arguments: str) -> dict[str, Any]:
    """The JSON of a polysilicon command."""
    done = subprocess.run([*POLYSILICON, *arguments, "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def serve_load(
    url: str, *, count: int, streams: int, prompt: int, output: int, seed: int
) -> dict[str, Any]:
    figures = call(
        *("bench", "serve", "--url", url, "--num-prompts", str(count), "--num-warmups", "0"),
        *("--max-concurrency", str(streams), "--prompt-tokens", str(prompt)),
        *("--output-tokens", str(output), "--seed", str(seed), "--save-detailed"),
    )
    if figures["failed"]:
        raise SystemExit(f"requests failed: {figures['failures']}")
    return figures


def decode_rates(figures: Mapping[str, Any], cores: int) -> tuple[float, float]:
    """Tokens per second while every stream runs, as measured and credited."""
    first = [at + ttft for at, ttft in zip(figures["start_times"], figures["ttfts"], strict=True)]
    last = [at + sum(gaps) for at, gaps in zip(first, figures["itls"], strict=True)]
    start, end = max(first), min(last)
    tokens = 0.0
    for at, gaps, length in zip(first, figures["itls"], figures["output_lens"], strict=True):
        # A piece of output may hold several tokens.
        each = (length - 1) / max(1, len(gaps))
        times = itertools.accumulate(gaps, initial=at)
        tokens += each * sum(start < time <= end for time in times)
    seconds = end - start
    credit = figures["client_cpu_seconds"] * seconds / figures["duration"] / cores
    return tokens / seconds, tokens / (seconds - credit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens, of the streams")
    parser.add_argument("--requests", type=int, default=20, help="of one stream, for the TTFT")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    engine = ["--backend", options.backend, "--max-sequences", str(options.streams)]
    lengths = ["--prompt-tokens", str(options.prompt), "--seed"]
    print(f"{options.model}, {options.streams} streams, prompts of {options.prompt} tokens")
    print(
        f"{'pair':>4} {'offline':>9} {'served':>9} {'credited':>9} {'ratio':>6} {'credited':>8}"
        f" {'generator':>9} {'TTFT offline':>12} {'served':>8} {'added':>6}"
    )
    pairs = []
    with serving(options.model, engine) as server:
        url = server.url
        for index in range(options.pairs):
            seed = str(index + 1)
            offline = call(
                *("bench", "throughput", options.model, *engine, *lengths, seed),
                *("--batch", str(options.streams), "--output-tokens", str(options.output)),
                *("--repeats", "1"),
            )
            streams = {"count": options.streams, "streams": options.streams}
            streams |= {"prompt": options.prompt, "seed": index + 1}
            serve_load(url, **streams, output=1)
            load = serve_load(url, **streams, output=options.output)
            rate, credited = decode_rates(load, cores)
            alone = call(
                *("bench", "latency", options.model, *engine, *lengths, seed),
                *("--output-tokens", "2", "--repeats", str(options.requests)),
            )
            single = serve_load(
                url,
                count=options.requests + 1,
                streams=1,
                prompt=options.prompt,
                output=2,
                seed=1000 + index,
            )
            pair = {
                "offline_tokens_per_s": offline["decode_tokens_per_s"],
                "served_tokens_per_s": rate,
                "credited_tokens_per_s": credited,
                "ratio": rate / offline["decode_tokens_per_s"],
                "credited_ratio": credited / offline["decode_tokens_per_s"],
                "client_cpu_seconds": load["client_cpu_seconds"],
                "offline_ttft_ms": alone["median_ttft_ms"],
                "served_ttft_ms": statistics.median(single["ttfts"][1:]) * 1e3,
            }
            pair["added_ttft_ms"] = pair["served_ttft_ms"] - pair["offline_ttft_ms"]
            pairs.append(pair)
            print_pair(str(index + 1), pair)
    medians = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    print_pair("med", medians)
    if options.json:
        report = {name: value for name, value in vars(options).items() if name != "json"}
        report["model"] = os.path.basename(options.model)
        report |= {"cores": cores, "medians": medians, "pairs": pairs}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def print_pair(name: str, pair: Mapping[str, float]) -> None:
    print(
        f"{name:>4} {pair['offline_tokens_per_s']:9,.1f} {pair['served_tokens_per_s']:9,.1f}"
        f" {pair['credited_tokens_per_s']:9,.1f} {pair['ratio']:6.3f} {pair['credited_ratio']:8.3f}"
        f" {pair['client_cpu_seconds']:7.2f} s {pair['offline_ttft_ms']:9.1f} ms"
        f" {pair['served_ttft_ms']:8.1f} {pair['added_ttft_ms']:6.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
