"""Sides of a comparison: each in a process of its own, taking turns. Standard library only: a side
may live in another environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAUSE = 0.2
"""Seconds before a turn, in which what the other side does after its own comes to rest."""

BEHIND = 0.9
"""A way of the other side that reaches less than this share of its best in the first round is not
run again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """work: `prefill` of one prompt of `tokens`; `decode` of `streams` behind as many tokens each;
    `shared`, the same behind one prefix that all streams have in common. output: tokens decoded a
    stream."""

    work: str
    tokens: int
    streams: int = 1
    output: int = 64


Rate = Callable[[Case, int], float]
"""Tokens per second of a case; the number is a seed."""


class Side:
    """The parent's end: calls methods of the object that the script gives to `serve`."""

    def __init__(self, python: str, script: str, *arguments: object) -> None:
        self._name = script
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self._name} ended with status {self._process.wait()}: see above")
        return json.loads(answer)

    def rate(self, *before: object) -> Rate:
        """`rate(*before, work, tokens, streams, output, seed)` of the other end."""

        def rate(case: Case, seed: int) -> float:
            time.sleep(PAUSE)
            return float(self("rate", *before, *dataclasses.astuple(case), seed))

        return rate

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(kind: Callable[..., object]) -> None:
    """A side's own end: makes the object from the command line and answers calls until the parent
    goes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    side = kind(*json.loads(sys.argv[1]))
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(side, method)(*arguments)), file=answers, flush=True)


def compare(
    cases: Sequence[Case], ours: Rate, theirs: Mapping[str, Rate], name: str, repeats: int
) -> list[dict[str, Any]]:
    """Run every case in pairs and print one table; its rows for the JSON.

    theirs: the other side, called `name`, by each way in which it may run; its best counts.
    """
    print(
        f"{'work':8} {'tokens':>7} {'streams':>8} {'polysilicon':>12} {name:>12} {'with':>10}"
        f" {'ratio':>7}"
    )
    rows = []
    for case in cases:
        row = _compare(case, ours, theirs, repeats)
        print(
            f"{case.work:8} {case.tokens:7} {case.streams:8} {row['ours']:12,.1f}"
            f" {row['theirs']:12,.1f} {row['with']:>10} {row['ratio']:7.2f}",
            flush=True,
        )
        rows.append(row)
    return rows


def _compare(case: Case, ours: Rate, theirs: Mapping[str, Rate], repeats: int) -> dict[str, Any]:
    """Medians of a case, whose sides take turns in going first."""
    own: list[float] = []
    others: dict[str, list[float]] = {way: [] for way in theirs}
    running = list(theirs)
    for repeat in range(repeats):
        if repeat % 2 == 0:
            own.append(ours(case, repeat))
        for way in running:
            others[way].append(theirs[way](case, repeat))
        if repeat % 2 == 1:
            own.append(ours(case, repeat))
        if repeat == 0:
            best_rate = max(rates[0] for rates in others.values())
            running = [way for way in running if others[way][0] >= BEHIND * best_rate]
    best = max(running, key=lambda way: statistics.median(others[way]))
    return {
        **dataclasses.asdict(case),
        "ours": statistics.median(own),
        "theirs": statistics.median(others[best]),
        "with": best,
        "ratio": statistics.median(a / b for a, b in zip(own, others[best], strict=True)),
        "runs": {"ours": own, **others},
    }


def numbers(text: str) -> list[int]:
    """An option's comma-separated numbers."""
    return [int(part) for part in text.split(",") if part]
