"""Attention with projected queries, keys and values, as `ModelConfig` describes it."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon.backend import Handle, KVPool
from polysilicon.models.architecture import Weights
from polysilicon.models.blocks import Linear, Norm, Step, place_linear
from polysilicon.models.config import ModelConfig
from polysilicon.ops import Normalization, Value

_PARTS = ("q", "k", "v")


class SelfAttention:
    """One layer's attention, from the normed hidden states to what is added to them."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        at = f"layers.{index}"
        self._config = config
        self._index = index
        self._qkv = place_linear(
            weights,
            [f"{at}.{part}" for part in _PARTS],
            inputs=config.hidden_size,
            biased=config.qkv_bias,
            target=f"{at}.qkv",
        )
        # Over each head, as part of the attention, or over all of a projection, before it.
        self._head_norms: tuple[Normalization | None, ...] = (None, None)
        self._projection_norms: tuple[Norm, ...] = ()
        if config.qk_norm or config.qk_projection_norm:
            offset = 1.0 if config.unit_offset_norms else 0.0
            norms: list[Handle] = [
                weights.vector(f"{at}.{name}_norm.weight", offset=offset) for name in "qk"
            ]
            if config.qk_norm:
                self._head_norms = tuple(
                    Normalization(weight=norm, eps=config.norm_eps) for norm in norms
                )
            else:
                self._projection_norms = tuple(
                    Norm(weight=norm, eps=config.norm_eps) for norm in norms
                )
        key, value = (f"{at}.{part}.weight" for part in "kv")
        self._kv_scales = weights.kv_scales(key, value, heads=config.kv_heads)
        self._sinks = weights.vector(f"{at}.sinks.weight") if config.sinks else None
        self._o = place_linear(
            weights,
            [f"{at}.o"],
            inputs=config.heads * config.head_dim,
            biased=config.o_bias,
            target=f"{at}.o",
        )

    def linears(self) -> Sequence[Linear]:
        return (self._qkv, self._o)

    def __call__(self, step: Step, x: Value, pool: KVPool) -> Value:
        config, ops = self._config, step.ops
        q, k, v = self._qkv(step, x)
        if self._projection_norms:
            q, k = (
                norm(ops, value)[0]
                for norm, value in zip(self._projection_norms, (q, k), strict=True)
            )
        q_norm, k_norm = self._head_norms
        x = ops.attention(
            q,
            k,
            v,
            batch=step.batch,
            pool=pool,
            layer=self._index,
            heads=config.heads,
            scale=config.attention_scale,
            rope=config.ropes[self._index],
            q_norm=q_norm,
            k_norm=k_norm,
            softcap=config.attention_softcap,
            sinks=self._sinks,
            **self._kv_scales,
        )
        (x,) = self._o(step, x)
        return x


def attention_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors that a `SelfAttention` is built from, by key."""
    at, hidden = f"layers.{index}", config.hidden_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in zip(_PARTS, (query, key, key), strict=True):
        shapes[f"{at}.{name}.weight"] = (rows, hidden)
        if config.qkv_bias:
            shapes[f"{at}.{name}.bias"] = (rows,)
    shapes[f"{at}.o.weight"] = (hidden, query)
    if config.o_bias:
        shapes[f"{at}.o.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"{at}.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    if config.qk_projection_norm:
        shapes |= {f"{at}.q_norm.weight": (query,), f"{at}.k_norm.weight": (key,)}
    if config.sinks:
        shapes[f"{at}.sinks.weight"] = (config.heads,)
    return shapes
