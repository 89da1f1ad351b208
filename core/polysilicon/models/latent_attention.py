"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

A token's keys and values, of every head, are products of one latent vector c and of one rotated
vector r that all heads share: `k_h = [Uk_h c, r]`, `v_h = Uv_h c`. So a head's scores are
`(Uk_h^T q_h) . c + q'_h . r`, and its output `Uv_h` times a mean of latents: attention with one
key head `[r, c]`, whose values are c, and with Uk in the projection of queries and Uv in that of
outputs. The cache holds `rope_dim + 2 * rank` numbers a token instead of two vectors for each head.

The two merged projections are computed when a model is placed, in 16 bits or more whatever the
checkpoint's encoding. They have `(rank + rope_dim) / (nope_dim + rope_dim)` and `rank / value_dim`
times the elements of what they come from (2.7 and 4 for DeepSeek-V3), which is what this form
costs for as long as there is no product by head among the ops. Adapters do not apply to it. Nor do
calibrated scales of KV: those of keys and values say nothing of latents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polysilicon.backend import KVPool
from polysilicon.models.architecture import Weights
from polysilicon.models.blocks import Linear, Norm, Step, place_linear
from polysilicon.models.config import Latent, ModelConfig
from polysilicon.ops import Value
from polysilicon.weights.encodings import Float32


class LatentAttention:
    """One layer's attention. The config's `latent` is set, with one key head of `head_dim =
    rope_dim + rank` and `value_dim = rank`."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        assert config.latent is not None
        latent, at = config.latent, f"layers.{index}"
        self._config = config
        self._index = index
        self._query_latent: Linear | None = None
        self._query_norm: Norm | None = None
        query = f"{at}.q.weight"
        if latent.query_rank is not None:
            self._query_latent = place_linear(weights, [f"{at}.q_a"], inputs=config.hidden_size)
            self._query_norm = Norm(
                weight=weights.vector(f"{at}.q_a_norm.weight"), eps=latent.norm_eps
            )
            query = f"{at}.q_b.weight"
        up = [f"{at}.{name}.weight" for name in _up_projections(latent)]
        self._query = Linear(
            weight=weights.computed(
                lambda q, *up: [_merged_queries(latent, config.heads, q, *up)], query, *up
            ),
            inputs=latent.query_rank or config.hidden_size,
        )
        self._latent = place_linear(weights, [f"{at}.kv_latent"], inputs=config.hidden_size)
        self._latent_norm = Norm(weight=weights.vector(f"{at}.kv_norm.weight"), eps=latent.norm_eps)
        # The key [r, c] is a sum of two products, since there is no op that joins columns.
        self._rotated_key = Linear(
            weight=weights.computed(
                lambda r: [np.concatenate([r, np.zeros((latent.rank, r.shape[1]), np.float32)])],
                f"{at}.k_rope.weight",
            ),
            inputs=config.hidden_size,
        )
        self._latent_key = Linear(
            weight=weights.computed(
                lambda: [np.eye(config.head_dim, latent.rank, -latent.rope_dim, np.float32)]
            ),
            inputs=latent.rank,
        )
        self._output = Linear(
            weight=weights.computed(
                lambda o, *up: [_merged_outputs(latent, config.heads, o, *up)],
                f"{at}.o.weight",
                *up,
            ),
            inputs=config.heads * latent.rank,
        )

    def linears(self) -> Sequence[Linear]:
        return ()

    def __call__(self, step: Step, x: Value, pool: KVPool) -> Value:
        config, ops = self._config, step.ops
        source = x
        if self._query_latent is not None and self._query_norm is not None:
            (source,) = self._query_latent(step, x)
            source, _ = self._query_norm(ops, source)
        (q,) = self._query(step, source)
        (latent,) = self._latent(step, x)
        latent, _ = self._latent_norm(ops, latent)
        (rotated,) = self._rotated_key(step, x)
        (unrotated,) = self._latent_key(step, latent)
        x = ops.attention(
            q,
            ops.add(rotated, unrotated),
            latent,
            batch=step.batch,
            pool=pool,
            layer=self._index,
            heads=config.heads,
            scale=config.attention_scale,
            rope=config.ropes[self._index],
        )
        (x,) = self._output(step, x)
        return x


def latent_attention_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors that a `LatentAttention` is built from, by key."""
    assert config.latent is not None
    latent, hidden, heads, at = config.latent, config.hidden_size, config.heads, f"layers.{index}"
    query = heads * (latent.nope_dim + latent.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.kv_latent.weight": (latent.rank, hidden),
        f"{at}.k_rope.weight": (latent.rope_dim, hidden),
        f"{at}.kv_norm.weight": (latent.rank,),
        f"{at}.o.weight": (hidden, heads * latent.value_dim),
    }
    if latent.query_rank is None:
        shapes[f"{at}.q.weight"] = (query, hidden)
    else:
        shapes |= {
            f"{at}.q_a.weight": (latent.query_rank, hidden),
            f"{at}.q_a_norm.weight": (latent.query_rank,),
            f"{at}.q_b.weight": (query, latent.query_rank),
        }
    if latent.split:
        shapes |= {
            f"{at}.k_b.weight": (heads, latent.rank, latent.nope_dim),
            f"{at}.v_b.weight": (heads, latent.value_dim, latent.rank),
        }
    else:
        rows = heads * (latent.nope_dim + latent.value_dim)
        shapes[f"{at}.kv_b.weight"] = (rows, latent.rank)
    return shapes


def _up_projections(latent: Latent) -> tuple[str, ...]:
    return ("k_b", "v_b") if latent.split else ("kv_b",)


def _by_head(latent: Latent, heads: int, up: Sequence[Float32]) -> tuple[Float32, Float32]:
    """Uk transposed `[H, rank, nope_dim]` and Uv `[H, value_dim, rank]`, as they are stored."""
    if latent.split:
        keys, values = up
        return keys, values
    rows = up[0].reshape(heads, latent.nope_dim + latent.value_dim, latent.rank)
    return rows[:, : latent.nope_dim].swapaxes(1, 2), rows[:, latent.nope_dim :]


def _merged_queries(latent: Latent, heads: int, q: Float32, *up: Float32) -> Float32:
    """`[q', Uk^T q]` of each head: `[H * (rope_dim + rank), inputs]`."""
    keys, _ = _by_head(latent, heads, up)
    rows = q.reshape(heads, latent.nope_dim + latent.rope_dim, q.shape[1])
    merged = np.concatenate([rows[:, latent.nope_dim :], keys @ rows[:, : latent.nope_dim]], axis=1)
    return merged.reshape(-1, q.shape[1])


def _merged_outputs(latent: Latent, heads: int, o: Float32, *up: Float32) -> Float32:
    """`O_h Uv_h` of each head, beside each other: `[hidden, H * rank]`."""
    _, values = _by_head(latent, heads, up)
    columns = o.reshape(len(o), heads, latent.value_dim).swapaxes(0, 1)
    return (columns @ values).swapaxes(0, 1).reshape(len(o), -1)
