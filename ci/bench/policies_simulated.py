"""Goodput of the scheduling policies under overload, simulated: the real scheduler and KV manager
replay a production trace on a clock that a step-time model moves. No device, no model.

    python ci/bench/policies_simulated.py --trace mooncake-conversation.jsonl --speed 0.5,1,2,4

The trace is Mooncake's (FAST'25, Apache-2.0; JSON lines of timestamp in ms, input_length,
output_length, hash_ids of 512-token blocks). Lengths are divided by `--input-scale` and
`--output-scale`, arrival times by `--speed`. The step-time model is `constant + prefill tokens *
a + decodes * b + KV slots read * c`, in milliseconds; the defaults were fitted to SmolLM2 on two
cores. Goodput: requests per second that met both TTFT and mean TPOT.
"""

import argparse
import dataclasses
import heapq
import json
from pathlib import Path

import numpy as np

from polysilicon.kv.manager import GroupSpec, KVManager
from polysilicon.policies import POLICIES, Claim
from polysilicon.scheduler import Scheduler
from polysilicon.sequence import Sequence, Step

PAGE = 16


@dataclasses.dataclass(frozen=True)
class Arrival:
    at: float
    prompt: tuple[int, ...]
    output: int


class Ends:
    needs_last_token = False

    def ends(self, token: int, num_output: int) -> bool:
        return False


@dataclasses.dataclass
class Outcome:
    ttft: float = float("inf")
    end: float = 0.0
    tokens: int = 0


def read_trace(
    path: Path, *, count: int, skip: int, input_scale: int, output_scale: int, speed: float
) -> list[Arrival]:
    arrivals = []
    with path.open() as lines:
        records = [json.loads(line) for _, line in zip(range(skip + count), lines, strict=False)]
    records = records[skip:]
    start = records[0]["timestamp"]
    for record in records:
        length = max(1, record["input_length"] // input_scale)
        block = 512 // input_scale
        ids = [
            (int(name) * block + offset) % (1 << 30)
            for name in record["hash_ids"]
            for offset in range(block)
        ]
        prompt = (ids + [7] * length)[:length]
        output = max(2, record["output_length"] // output_scale)
        at = (record["timestamp"] - start) / 1e3 / speed
        arrivals.append(Arrival(at, tuple(prompt), output))
    return arrivals


def simulate(
    arrivals: list[Arrival], policy: str, options: argparse.Namespace, seed: int
) -> dict[str, float]:
    random = np.random.default_rng(seed)
    length = max(len(arrival.prompt) + arrival.output for arrival in arrivals) + PAGE
    kv = KVManager(
        groups=[GroupSpec(name="full", pages=options.pages, window=None)],
        page_size=PAGE,
        max_sequences=options.max_sequences,
        max_length=length,
    )
    scheduler = Scheduler(
        kv=kv, step_tokens=options.step_tokens, max_length=length, policy=POLICIES[policy]
    )
    costs = [float(cost) for cost in options.step_cost.split(",")]
    ttft, tpot = options.ttft / 1e3, options.tpot / 1e3
    outcomes: dict[Sequence, Outcome] = {}
    queue = list(enumerate(arrivals))
    heapq.heapify(queue)
    in_flight: list[tuple[Step, int]] = []
    now = free_at = 0.0

    def arrive() -> None:
        while queue and queue[0][1].at <= now:
            serial, arrival = heapq.heappop(queue)
            sequence = Sequence(
                arrival.prompt,
                claim=Claim(arrival=arrival.at, serial=serial, ttft=ttft, tpot=tpot),
                max_tokens=arrival.output,
                end_rule=Ends(),
            )
            outcomes[sequence] = Outcome()
            scheduler.add(sequence)

    def complete() -> None:
        nonlocal now, free_at
        step, fence = in_flight.pop(0)
        decodes = [share for share in step.scheduled if share.count == 1]
        features = (
            1,
            step.num_tokens - len(decodes),
            len(decodes),
            sum(share.start for share in decodes),
        )
        seconds = sum(c * f for c, f in zip(costs, features, strict=True)) / 1e3
        free_at = now = max(now, free_at) + seconds * random.normal(1.0, 0.03)
        tokens = np.ones(sum(share.samples for share in step.scheduled), np.int32)
        for sequence, _ in scheduler.complete(step, fence, tokens, now):
            outcome = outcomes[sequence]
            if not outcome.tokens:
                outcome.ttft = now - sequence.claim.arrival
            outcome.tokens += 1
            outcome.end = now

    while queue or scheduler.has_work or in_flight:
        arrive()
        step = scheduler.schedule(now)
        if step is not None:
            in_flight.append((step, scheduler.submitted(step, now)))
        if in_flight and (step is None or len(in_flight) == 2):
            complete()
        elif step is None and queue:
            now = max(now, queue[0][1].at)
    kv.check_integrity()
    made = 0
    tpots = []
    for sequence, outcome in outcomes.items():
        assert outcome.tokens == sequence.max_tokens
        mean = (outcome.end - sequence.claim.arrival - outcome.ttft) / (outcome.tokens - 1)
        tpots.append(mean)
        made += outcome.ttft <= ttft and mean <= tpot
    return {
        "requests": len(outcomes),
        "offered_per_s": len(arrivals) / max(arrivals[-1].at, 1e-9),
        "goodput_per_s": made / now,
        "met": made / len(outcomes),
        "p50_ttft_ms": float(np.median([outcome.ttft for outcome in outcomes.values()])) * 1e3,
        "p99_tpot_ms": float(np.quantile(tpots, 0.99)) * 1e3,
        "preemptions": scheduler.num_preemptions,
        "seconds": now,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--input-scale", type=int, default=32)
    parser.add_argument("--output-scale", type=int, default=8)
    parser.add_argument("--speed", default="0.5,1,2,4")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--ttft", type=float, default=1000)
    parser.add_argument("--tpot", type=float, default=50)
    parser.add_argument("--pages", type=int, default=4000)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--step-cost", default="2.0,0.36,0.6,0.0003")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for speed in (float(text) for text in options.speed.split(",")):
        arrivals = read_trace(
            options.trace,
            count=options.count,
            skip=options.skip,
            input_scale=options.input_scale,
            output_scale=options.output_scale,
            speed=speed,
        )
        for policy in options.policies.split(","):
            figures = simulate(arrivals, policy, options, options.seed)
            results.append({"speed": speed, "policy": policy} | figures)
    if options.json:
        print(json.dumps(results))
        return
    names = list(results[0])
    print(" ".join(f"{name:>13}" for name in names))
    for result in results:
        values = (
            f"{value:13.2f}" if isinstance(value, float) else f"{value!s:>13}"
            for value in result.values()
        )
        print(" ".join(values))


if __name__ == "__main__":
    main()
