"""Ceilings: how fast a model can be at most on hardware with these figures.

A part of a step takes at least as long as moving its bytes takes at the full bandwidth, and as its
products take at the full rate (the roofline model, Williams, Waterman and Patterson, CACM 2009).
The parts follow one another, as each needs what the one before it gives, so that their times add
up: while attention waits for KV, the units that multiply weights are idle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polysilicon.backend import KVSpec
from polysilicon.models.config import ModelConfig
from polysilicon.plan.weights import WeightTraffic

_LOGIT = 4
"""Bytes of a logit, a float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Some of a step's work that is done together: bytes that are read or written, and operations
    of products, a multiplication and an addition being two."""

    nbytes: float
    operations: float

    def seconds(self, *, bandwidth: float | None, rate: float | None) -> float | None:
        """The least that it takes: by bandwidth (bytes a second) or by the rate of products,
        whichever is longer; None where neither is known."""
        bounds = []
        if bandwidth is not None:
            bounds.append(self.nbytes / bandwidth)
        if rate is not None:
            bounds.append(self.operations / rate)
        return max(bounds, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What some steps do, part by part. working_set: bytes that one step moves, which caches may
    hold."""

    parts: tuple[Part, ...]
    working_set: float

    @property
    def nbytes(self) -> float:
        return sum(part.nbytes for part in self.parts)

    @property
    def operations(self) -> float:
        return sum(part.operations for part in self.parts)

    def seconds(self, *, bandwidth: float | None, rate: float | None) -> float | None:
        """The least that all parts take one after another; None where neither is known."""
        seconds = 0.0
        for part in self.parts:
            least = part.seconds(bandwidth=bandwidth, rate=rate)
            if least is None:
                return None
            seconds += least
        return seconds


def decode_work(
    traffic: WeightTraffic,
    config: ModelConfig,
    specs: Sequence[KVSpec],
    *,
    concurrency: int,
    context: int,
) -> Work:
    """One step that gives each of `concurrency` sequences of `context` tokens its next token: the
    weights are read once, the KV of every sequence, and its logits are written and read."""
    kv = sum(spec.token_bytes * _seen(spec, context) for spec in specs)
    pairs = sum(len(spec.layers) * _seen(spec, context) for spec in specs)
    attention = Part(
        nbytes=concurrency * kv, operations=2.0 * concurrency * pairs * _pair_products(config)
    )
    parts = (
        *_layers(traffic, tokens=concurrency, steps=1),
        attention,
        *_head(traffic, config, rows=concurrency),
    )
    return Work(parts=parts, working_set=sum(part.nbytes for part in parts))


def prefill_work(
    traffic: WeightTraffic,
    config: ModelConfig,
    specs: Sequence[KVSpec],
    *,
    tokens: int,
    step_tokens: int,
) -> Work:
    """Computing the KV of a prompt of `tokens` tokens in chunks of `step_tokens`, and the logits of
    its last one. Attention grows with the square of the prompt, in windows with their product; the
    KV that it reads is little beside what a chunk's many queries make of it, and not counted."""
    chunks, rest = divmod(tokens, step_tokens)
    pairs = sum(len(spec.layers) * _pairs(spec, tokens) for spec in specs)
    return Work(
        parts=(
            *_layers(traffic, tokens=step_tokens, steps=chunks),
            *_layers(traffic, tokens=rest, steps=1 if rest else 0),
            Part(nbytes=0.0, operations=2.0 * pairs * _pair_products(config)),
            *_head(traffic, config, rows=1),
        ),
        working_set=traffic.bytes_of(min(tokens, step_tokens)),
    )


def _layers(traffic: WeightTraffic, *, tokens: int, steps: int) -> tuple[Part, Part]:
    """The layers' matrices in `steps` steps of `tokens` tokens: experts, of which a step's tokens
    share few, apart from the others."""
    rows = 2.0 * steps * tokens
    return (
        Part(nbytes=steps * traffic.layer_read, operations=rows * traffic.layer_products),
        Part(
            nbytes=steps * traffic.expert_bytes(tokens),
            operations=rows * traffic.expert_products,
        ),
    )


def _head(traffic: WeightTraffic, config: ModelConfig, *, rows: int) -> tuple[Part, Part]:
    """The output projection, which writes the logits, and the sampler, which reads them."""
    logits = rows * config.vocab_size * _LOGIT
    return (
        Part(nbytes=traffic.head_read + logits, operations=2.0 * rows * traffic.head_products),
        Part(nbytes=logits, operations=0.0),
    )


def _pair_products(config: ModelConfig) -> int:
    """Multiplications of one layer's attention for a query and a key that it sees."""
    return config.heads * (config.head_dim + (config.value_dim or config.head_dim))


def _seen(spec: KVSpec, context: int) -> int:
    """Tokens that the last of `context` sees, its own included."""
    return context if spec.window is None else min(context, spec.window)


def _pairs(spec: KVSpec, tokens: int) -> int:
    """Pairs of a query and a key that it sees, of a prompt: the i-th token sees i, or a window."""
    full = _seen(spec, tokens)
    return full * (full + 1) // 2 + (tokens - full) * full


def end_to_end(*, ttft: float, tpot: float, output_tokens: int) -> float:
    """Seconds from a request to its last token; TPOT counts from the second one."""
    return ttft + tpot * (output_tokens - 1)


def cost_per_million(*, price: float, tokens_per_s: float) -> float:
    """What a million tokens cost where the hardware costs `price` an hour."""
    return price / 3600 / tokens_per_s * 1e6
