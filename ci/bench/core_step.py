"""What the core itself costs a step: scheduler, KV manager and the batch's arrays, no device.

    python ci/bench/core_step.py --sequences 64 --context 512

Prints medians over the steps of several runs, in microseconds.
"""

import argparse
import json
import statistics
import time

import numpy as np

from polysilicon.engine.batching import SequenceSampling, build_step
from polysilicon.kv.manager import GroupSpec, KVManager
from polysilicon.policies import Claim
from polysilicon.request import SamplingParams
from polysilicon.sampling.rows import SequenceSampler
from polysilicon.scheduler import Scheduler
from polysilicon.sequence import Sequence


def run(sequences: int, context: int, steps: int, window: int | None) -> dict[str, float]:
    page_size = 16
    length = context + steps + 64
    pages = 1 + sequences * -(-length // page_size)
    groups = [GroupSpec(name="full", pages=pages, window=None)]
    if window:
        groups.append(GroupSpec(name="window", pages=pages, window=window))
    kv = KVManager(groups=groups, page_size=page_size, max_sequences=sequences, max_length=length)
    scheduler = Scheduler(kv=kv, step_tokens=sequences * context, max_length=length)
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=None, ignore_eos=True)
    samplings = {}
    for serial in range(sequences):
        prompt = random.integers(0, 49152, context).tolist()
        sampler = SequenceSampler(
            params, seed=serial, choice=0, prompt=prompt, eos_ids=frozenset(), vocab_size=49152
        )
        sequence = Sequence(
            prompt,
            claim=Claim(serial=serial),
            max_tokens=length,
            end_rule=sampler,
        )
        samplings[sequence] = SequenceSampling(sampler=sampler, logprobs=None, prompt_logprobs=None)
        scheduler.add(sequence)
    times: dict[str, list[float]] = {"schedule": [], "arrays": [], "submit": [], "complete": []}
    in_flight = []
    while len(times["complete"]) < steps:
        at = [time.perf_counter()]
        step = scheduler.schedule(at[0])
        at.append(time.perf_counter())
        previous = in_flight[-1][2].draw_rows if in_flight else {}
        arrays = build_step(step, kv, samplings, previous, 49152)
        at.append(time.perf_counter())
        fence = scheduler.submitted(step, at[-1])
        in_flight.append((step, fence, arrays))
        at.append(time.perf_counter())
        if len(in_flight) > 1:
            done, fence, arrays = in_flight.pop(0)
            tokens = random.integers(0, 49152, len(arrays.draw_rows)).astype(np.int32)
            at.append(time.perf_counter())
            for sequence, token in scheduler.complete(done, fence, tokens, at[-1]):
                samplings[sequence].sampler.append(token)
            times["complete"].append(time.perf_counter() - at[-1])
            for name, begin, end in zip(times, at, at[1:], strict=False):
                times[name].append(end - begin)
    # The first steps prefill; what follows is pure decode.
    medians = {name: statistics.median(values[8:]) * 1e6 for name, values in times.items()}
    medians["scheduler and KV"] = medians["schedule"] + medians["submit"] + medians["complete"]
    medians["whole"] = medians["scheduler and KV"] + medians["arrays"]
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--window", type=int, default=None, help="add a sliding-window group")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [
        run(options.sequences, options.context, options.steps, options.window)
        for _ in range(options.repeats)
    ]
    result = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    if options.json:
        print(json.dumps({"sequences": options.sequences, "microseconds": result}))
        return
    print(f"{options.sequences} decoding sequences, context {options.context}; microseconds a step")
    for name, value in result.items():
        print(f"{name:18} {value:8.1f}")


if __name__ == "__main__":
    main()
