"""What the engine says of itself while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polysilicon.kv.groups import GroupUsage


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A moment of the engine; counts of tokens, steps and preemptions are since it started.

    requests: in the engine, each counted once. running, waiting: sequences (choices), waiting ones
    by reason: `capacity` (rows, pages or the step's budget), `grammar` (being compiled).
    kv: where the pages of each KV group are.
    prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found there.
    prompt_tokens: computed, without those found. output_tokens: sampled.
    step_seconds: of each step since the stats before, from one result to the next, or from its
    submission where the engine was idle before.
    """

    requests: int = 0
    running: int = 0
    waiting: Mapping[str, int] = dataclasses.field(default_factory=dict)
    kv: tuple[GroupUsage, ...] = ()
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    step_seconds: tuple[float, ...] = ()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, whatever for."""
        return sum(self.waiting.values())

    @property
    def kv_use(self) -> float:
        """Share of KV pages that sequences hold, of the fullest group; cached ones are free."""
        return max((1 - (group.free + group.cached) / group.total for group in self.kv), default=0)
