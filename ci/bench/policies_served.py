"""Goodput of the scheduling policies under overload, served: `polysilicon serve` with each policy
in turn, alternating, under a production trace that `polysilicon bench serve` replays.

    python ci/bench/policies_served.py smollm2 --trace mooncake-conversation.jsonl --speed 2,4

The trace is Mooncake's (FAST'25, Apache-2.0), as for `policies_simulated.py`; lengths are
multiplied by `--length-scale`, and times run `--speed` times faster. Every server has the same SLO
and no bound on its queue, so that the policies alone differ. Medians over `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from serve_overhead import call

from polysilicon.testing.served import serving

FIELDS = (
    "request_throughput",
    "request_goodput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "failed",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--count", default="250")
    parser.add_argument("--length-scale", default="0.03125")
    parser.add_argument("--speed", default="2,4")
    parser.add_argument("--policies", default="fcfs,slo")
    parser.add_argument("--ttft", default="1000")
    parser.add_argument("--tpot", default="60")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    results = []
    for speed in options.speed.split(","):
        runs: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for policy in options.policies.split(","):
                engine = [
                    *("--backend", options.backend, "--policy", policy),
                    *("--slo-ttft", options.ttft, "--slo-tpot", options.tpot),
                    *("--max-waiting", "100000", "--max-waiting-kv", "100000"),
                ]
                with serving(options.model, engine) as server:
                    figures = call(
                        *("bench", "serve", "--url", server.url, "--mooncake", str(options.trace)),
                        *("--num-prompts", options.count, "--length-scale", options.length_scale),
                        *("--speed", speed),
                        *("--goodput", f"ttft:{options.ttft}", f"tpot:{options.tpot}"),
                    )
                runs.setdefault(policy, []).append({name: figures[name] for name in FIELDS})
        for policy, figures_of in runs.items():
            medians = {
                name: statistics.median(each[name] for each in figures_of) for name in FIELDS
            }
            results.append({"speed": float(speed), "policy": policy} | medians)
    print(" ".join(f"{name:>18}" for name in results[0]))
    for result in results:
        print(
            " ".join(
                f"{value:18.2f}" if isinstance(value, float) else f"{value!s:>18}"
                for value in result.values()
            )
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
