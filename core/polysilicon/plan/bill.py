"""What a model takes of a device's memory, item by item, for the planner and for the engine's own
budget alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from polysilicon.backend import KVSpec
from polysilicon.models.config import ModelConfig
from polysilicon.plan.kv import sequence_pages
from polysilicon.plan.units import size

_FLOAT = 4

_SCRATCH = 16 << 20
"""Bytes of kernels' own scratch memory, whatever the model."""

_SAMPLED_COPIES = 4
"""How often logits of sampling sequences are held: of two steps in flight, each as outputs and as
the sampler's."""

_PROMPT_COPIES = 2
"""How often logits of a whole step are, which log-probabilities of prompts take: outputs and the
sampler's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bill:
    """Bytes by item. kv: of each KV group, by name. adapters: of all their slots. workspace: an
    estimate of activations, logits and kernels' scratch memory."""

    weights: int
    kv: Mapping[str, int]
    adapters: int
    workspace: int

    @property
    def kv_total(self) -> int:
        return sum(self.kv.values())

    @property
    def total(self) -> int:
        return self.weights + self.kv_total + self.adapters + self.workspace

    def __str__(self) -> str:
        """The items in a line."""
        items = {"weights": self.weights}
        items |= {f"KV {name}": nbytes for name, nbytes in self.kv.items()}
        if self.adapters:
            items["adapters"] = self.adapters
        items["workspace about"] = self.workspace
        return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in items.items())


def kv_bytes(
    specs: Sequence[KVSpec], *, concurrency: int, context: int, step_tokens: int
) -> dict[str, int]:
    """Bytes of each KV group's pages for `concurrency` sequences of `context` tokens, page 0
    included: of a group with a window no more than the window and a step's tokens span."""
    return {
        spec.name: spec.page_bytes * (1 + concurrency * sequence_pages(spec, context, step_tokens))
        for spec in specs
    }


def workspace_bytes(config: ModelConfig, *, step_tokens: int, max_sequences: int) -> int:
    """An estimate of what a device takes beside weights, KV and adapters.

    Activations are float32: for every token of a step the residual stream and two values of its
    width, and the widest of what stands between two of them: queries, keys, values and what
    attention makes of them, or the three values of a feed-forward block, of a mixture for every
    expert that the token goes to. Logits are float32, with a row for every sequence that samples in
    a step, and with a row for every token of a step.
    """
    value_dim = config.value_dim or config.head_dim
    widths = [
        (config.heads + config.kv_heads) * (config.head_dim + value_dim),
        3 * config.intermediate_size,
    ]
    if config.experts is not None:
        experts = config.experts
        widths.append(experts.top_k * (3 * experts.size + config.hidden_size))
    tokens = step_tokens * (3 * config.hidden_size + max(widths))
    sampled = min(max_sequences, step_tokens)
    rows = _SAMPLED_COPIES * sampled + _PROMPT_COPIES * step_tokens
    return (tokens + rows * config.vocab_size) * _FLOAT + _SCRATCH


def adapter_bytes(linears: Iterable[tuple[int, int]], *, adapters: int, rank: int) -> int:
    """Bytes of `adapters` LoRA adapters of `rank` on linears of (outputs, inputs), in float32, as
    they are handed to a device."""
    return adapters * rank * sum(map(sum, linears)) * _FLOAT
