"""Ceilings: how fast a model can be at most on hardware with these figures.

A step takes at least as long as reading its bytes takes at the full bandwidth, and as its products
take at the full rate (the roofline model, Williams, Waterman and Patterson, CACM 2009).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polysilicon.backend import KVSpec
from polysilicon.models.config import ModelConfig
from polysilicon.plan.weights import WeightTraffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What some steps do together: bytes that are read, and products, a multiplication and an
    addition being two. working_set: bytes that one step reads, which caches may hold."""

    nbytes: float
    operations: float
    working_set: float

    def seconds(self, *, bandwidth: float | None, rate: float | None) -> float | None:
        """The least that it takes: by bandwidth (bytes a second) or by the rate of products,
        whichever is longer; None where neither is known."""
        bounds = []
        if bandwidth is not None:
            bounds.append(self.nbytes / bandwidth)
        if rate is not None:
            bounds.append(self.operations / rate)
        return max(bounds, default=None)


def decode_work(
    traffic: WeightTraffic,
    config: ModelConfig,
    specs: Sequence[KVSpec],
    *,
    concurrency: int,
    context: int,
) -> Work:
    """One step that gives each of `concurrency` sequences of `context` tokens its next token: the
    weights are read once, and the KV of every sequence."""
    kv = sum(spec.token_bytes * _seen(spec, context) for spec in specs)
    pairs = sum(len(spec.layers) * _seen(spec, context) for spec in specs)
    products = traffic.layer_products + traffic.head_products + pairs * _pair_products(config)
    nbytes = traffic.bytes_of(concurrency) + concurrency * kv
    return Work(nbytes=nbytes, operations=2.0 * concurrency * products, working_set=nbytes)


def prefill_work(
    traffic: WeightTraffic,
    config: ModelConfig,
    specs: Sequence[KVSpec],
    *,
    tokens: int,
    step_tokens: int,
) -> Work:
    """Computing the KV of a prompt of `tokens` tokens in chunks of `step_tokens`, and the logits of
    its last one. Attention grows with the square of the prompt, in windows with their product."""
    chunks, rest = divmod(tokens, step_tokens)
    nbytes = chunks * traffic.bytes_of(step_tokens) + (traffic.bytes_of(rest) if rest else 0.0)
    pairs = sum(len(spec.layers) * _pairs(spec, tokens) for spec in specs)
    products = (
        tokens * traffic.layer_products + traffic.head_products + pairs * _pair_products(config)
    )
    return Work(
        nbytes=nbytes,
        operations=2.0 * products,
        working_set=traffic.bytes_of(min(tokens, step_tokens)),
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
