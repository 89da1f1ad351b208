"""Captured steps, one for each set of buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from polysilicon_torch.batches import Buckets, StepBuffer
from polysilicon_torch.runtime import Graphs, Runtime

MOST_QUERIES = 8
"""Tokens a sequence of a captured step: a decode, or the few that a drafter proposed. Steps with
longer chunks of prompts keep a card busy enough to be submitted one call after the other."""

MOST_GRAPHS = 256
"""Further buckets run eagerly."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepOutputs:
    """What a step's forward returned, padded: logits float32 `[L, V]`, hidden `[T, D]` of the
    layers that the program keeps."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Graph:
    """A captured step: fill `step` and replay."""

    def __init__(self, step: StepBuffer, replay: Callable[[], None], outputs: StepOutputs) -> None:
        self.step = step
        self._replay = replay
        self._outputs = outputs

    def replay(self) -> StepOutputs:
        """Submit it. What it returns is written anew by the next replay."""
        self._replay()
        return self._outputs


class GraphCache:
    """Graphs of one program by buckets. Buckets run eagerly when they are first met, which compiles
    and chooses kernels; they are captured when they are met again."""

    def __init__(
        self, runtime: Runtime, graphs: Graphs, run: Callable[[StepBuffer], StepOutputs]
    ) -> None:
        self._runtime = runtime
        self._capture = graphs.capture
        self._run = run
        self._met: set[Buckets] = set()
        self._graphs: dict[Buckets, Graph] = {}

    def find(self, buckets: Buckets) -> Graph | None:
        """The graph of these buckets, captured now where it is time, or None to run eagerly."""
        if buckets in self._graphs:
            return self._graphs[buckets]
        if buckets.max_query > MOST_QUERIES or len(self._graphs) == MOST_GRAPHS:
            return None
        if buckets not in self._met:
            self._met.add(buckets)
            return None
        step = StepBuffer(self._runtime, buckets)
        replay, outputs = self._capture(lambda: self._run(step))
        graph = self._graphs[buckets] = Graph(step, replay, outputs)
        return graph
