"""What stays the same while an engine runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What clients of an engine may need to know of its model and its room.

    max_length: most tokens of a sequence, prompt and output. vocab_size: ids lie below it.
    page_size: tokens of a KV page. kv_pages: of the KV group that has fewest, page 0 left out.
    max_sequences: that run at once. adapters: names of loaded LoRA adapters.
    memory: the memory bill, bytes by purpose (weights, kv, ...), as the device declares it.
    backend: name of the backend or whole-model executor. notes: what the user should know.
    load_seconds: what loading took.
    """

    max_length: int
    vocab_size: int
    page_size: int
    kv_pages: int
    max_sequences: int
    eos_ids: frozenset[int]
    adapters: tuple[str, ...] = ()
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    backend: str = ""
    notes: tuple[str, ...] = ()
    load_seconds: float = 0.0
