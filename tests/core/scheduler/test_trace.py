"""The scheduler under the public Mooncake conversation trace, without a device."""

import json
from pathlib import Path

import numpy as np
import pytest

TRACE = Path(__file__).parents[2] / "fixtures" / "mooncake-conversation-head.jsonl"
BLOCK = 8
SCALE = 64
"""The trace's blocks are 512 tokens; here they are 8, and every length shrinks alike."""


def requests():
    for line in TRACE.read_text().splitlines():
        entry = json.loads(line)
        size = max(1, entry["input_length"] // SCALE)
        prompt = [
            (block * 7919 + offset) % 30_011
            for block in entry["hash_ids"]
            for offset in range(BLOCK)
        ]
        yield entry["timestamp"] / 1000, prompt[:size], max(1, entry["output_length"] // SCALE)


@pytest.mark.parametrize("pages", [400, 20_000])
@pytest.mark.parametrize("ahead", [False, True])
def test_everybody_is_served_in_bounded_time_and_prefixes_are_shared(simulate, pages, ahead):
    simulation = simulate(
        pages=pages,
        page_size=8,
        step_tokens=128,
        max_sequences=32,
        max_length=2048,
        ahead=ahead,
        check=False,
    )
    arrivals = list(requests())
    assert len(arrivals) == 400
    now, step_seconds = 0.0, 0.05
    waiting = iter(arrivals)
    upcoming = next(waiting)
    admitted_at, first_token_at, pending = {}, {}, {}
    while upcoming or simulation.scheduler.has_work or simulation.in_flight:
        while upcoming and upcoming[0] <= now:
            sequence = simulation.add(upcoming[1], upcoming[2], arrival=upcoming[0])
            admitted_at[sequence], pending[sequence] = now, upcoming
            upcoming = next(waiting, None)
        simulation.step()
        now += step_seconds
        for sequence in list(pending):
            if sequence.num_tokens > sequence.num_prompt:
                first_token_at[sequence] = now
                del pending[sequence]
    simulation.kv.check_integrity()
    assert len(simulation.finished) == 400
    assert all(usage.in_use == usage.limbo == 0 for usage in simulation.kv.usage())
    hits = simulation.kv.prefix_hits / simulation.kv.prefix_queries
    repeats = 1 - len({block for _, prompt, _ in arrivals for block in blocks(prompt)}) / sum(
        len(blocks(prompt)) for _, prompt, _ in arrivals
    )
    assert repeats > 0.1
    assert hits > repeats * (0.1 if pages == 400 else 0.8)
    # No starvation: nobody waits longer than all the work there is would take.
    work = sum(step.num_tokens for step in simulation.steps) / 128 * step_seconds
    waits = np.array([first_token_at[s] - admitted_at[s] for s in admitted_at])
    assert waits.max() < work


def blocks(prompt):
    whole = len(prompt) // BLOCK
    return [tuple(prompt[BLOCK * index : BLOCK * (index + 1)]) for index in range(whole)]
