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

_SCRATCH = 32 << 20
"""Bytes of kernels' own scratch memory, whatever the model."""

_OUTPUT_COPIES = 8
"""How often logits of sampling sequences are held as outputs: of steps in flight, and kept for
those to come."""

_PROMPT_COPIES = 3
"""The same for logits of every token of a step, which are rare and of few sizes."""

_SAMPLER_COPIES, _SAMPLER_ROWS = 3, 64
"""The sampler's copies of logits, their ids and scores, of so many rows at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bill:
    """Bytes by item. kv: of each KV group, by name. adapters: of all their slots. workspace: an
    estimate of activations, logits and kernels' scratch memory. prompt_logits: what steps take
    beside, at most, for requests that ask for log-probabilities of their prompts; not in `total`.
    """

    weights: int
    kv: Mapping[str, int]
    adapters: int
    workspace: int
    prompt_logits: int

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
        items["log-probabilities of prompts up to"] = self.prompt_logits
        return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in items.items()) + " more"


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
    expert that the token goes to. Logits are float32, a row for every sequence that samples.
    """
    value_dim = config.value_dim or config.head_dim
    widths = [
        (config.heads + config.kv_heads) * (config.head_dim + value_dim),
        3 * config.intermediate_size,
    ]
    if config.experts is not None:
        experts = config.experts
        widths.append(experts.top_k * (3 * experts.size + config.hidden_size))
    activations = step_tokens * (3 * config.hidden_size + max(widths))
    logits = _logits(config, rows=min(max_sequences, step_tokens), copies=_OUTPUT_COPIES)
    return activations * _FLOAT + logits + _SCRATCH


def prompt_logits_bytes(config: ModelConfig, *, step_tokens: int) -> int:
    """The most that log-probabilities of prompts take: logits of every token of a step."""
    return _logits(config, rows=step_tokens, copies=_PROMPT_COPIES)


def _logits(config: ModelConfig, *, rows: int, copies: int) -> int:
    """Bytes of rows of logits as outputs and in the sampler."""
    held = copies * rows + _SAMPLER_COPIES * min(rows, _SAMPLER_ROWS)
    return held * config.vocab_size * _FLOAT


def adapter_bytes(linears: Iterable[tuple[int, int]], *, adapters: int, rank: int) -> int:
    """Bytes of `adapters` LoRA adapters of `rank` on linears of (outputs, inputs), in float32, as
    they are handed to a device."""
    return adapters * rank * sum(map(sum, linears)) * _FLOAT
