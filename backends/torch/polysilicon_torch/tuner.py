"""Measuring block sizes and launch options on the card at hand, kernel by kernel."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from polysilicon.backend import DeviceError
from polysilicon_torch.runtime import Runtime
from polysilicon_torch.trials import Trial
from polysilicon_torch.tuning import Rule, Tuning, TuningError, card_path, write_card

_LEAST_SECONDS = 0.02
"""How long a launch is repeated for one reading."""

_GAIN = 0.97
"""Less than this share of the time makes a choice better: readings vary by a few percent."""

_MOST_READINGS = 48
"""Of one trial: each of them compiles a kernel."""

Choice = dict[str, int]


def tune(
    runtime: Runtime,
    tuning: Tuning,
    card: str,
    trials: Iterable[Trial],
    report: Callable[[str], None],
) -> str:
    """Search the space of each trial from the tables' own choice, keep what is fastest for `card`
    and return the file's path. What was kept for the card before is replaced. Raises DeviceError
    where the tables' own choice cannot run, or nothing can be kept."""
    rules: dict[str, list[Rule]] = {}
    path = card_path(card, tuning.target)
    for trial in trials:
        start = tuning.pick(trial.kernel, **trial.shape)
        before, (best, after) = descend(
            start,
            {key: values for key, values in trial.space.items() if key in start},
            functools.partial(_seconds, runtime, trial, tuning),
        )
        name = " ".join([trial.kernel, *(f"{key}={value}" for key, value in trial.shape.items())])
        if math.isinf(before):
            raise DeviceError(f"{name} does not run with {start}")
        changed = {key: value for key, value in best.items() if value != start[key]}
        report(f"{name}: {1e6 * before:.1f} us, {1e6 * after:.1f} us with {changed or 'the same'}")
        rules.setdefault(trial.kernel, []).append(Rule(when=trial.when, use=best))
        try:  # after each trial, so that an interrupt loses none, and a folder's fault shows early
            path = write_card(card, tuning.target, rules)
        except TuningError as error:
            raise DeviceError(str(error)) from None
    return str(path)


def descend(
    start: Choice, space: Mapping[str, Sequence[int]], seconds: Callable[[Choice], float]
) -> tuple[float, tuple[Choice, float]]:
    """Change one key at a time while that is faster: the time at the start, and the best choice
    found with its own. Choices that cannot run take forever."""
    readings: dict[tuple[tuple[str, int], ...], float] = {}

    def read(choice: Choice) -> float:
        key = tuple(sorted(choice.items()))
        if key not in readings:
            full = len(readings) >= _MOST_READINGS
            readings[key] = math.inf if full else seconds(choice)
        return readings[key]

    best, least = dict(start), read(start)
    first, improved = least, not math.isinf(least)
    while improved:
        improved = False
        for key, values in space.items():
            for value in values:
                choice = best | {key: value}
                if read(choice) < _GAIN * least:
                    best, least, improved = choice, read(choice), True
    return first, (best, least)


def _seconds(runtime: Runtime, trial: Trial, tuning: Tuning, choice: Choice) -> float:
    """Of one launch; infinite where the compiler or the card refuses the choice."""
    tuning = tuning.over(trial.kernel, choice)
    with runtime.active():
        try:
            for launch in trial.launches:
                launch(tuning)
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                raise
            return math.inf
        runtime.synchronize()
        replay = _captured(runtime, trial, tuning)
        repeats, elapsed = 1, 0.0
        while elapsed < _LEAST_SECONDS:
            begin = time.perf_counter()
            for _ in range(repeats):
                replay()
            runtime.synchronize()
            elapsed = time.perf_counter() - begin
            repeats *= 2
        return elapsed / (repeats // 2) / len(trial.launches)


def _captured(runtime: Runtime, trial: Trial, tuning: Tuning) -> Callable[[], object]:
    """All launches of a trial in one call: as a graph where there are any, for launching from
    Python may take longer than the kernel."""

    def run() -> list[object]:
        return [launch(tuning) for launch in trial.launches]

    return run if runtime.graphs is None else runtime.graphs.capture(run)[0]
