"""Latent attention with the keys and values of every head, for calibration.

What runs a model merges some of its projections (`models.latent_attention`), so that their own
inputs do not occur there. Here each is a linear that reads what it was trained to read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from polysilicon.backend import KVPool
from polysilicon.models.architecture import Weights
from polysilicon.models.blocks import Linear, Norm, Step, place_linear
from polysilicon.models.config import Latent, ModelConfig
from polysilicon.weights.encodings import Float32


class ExpandedAttention:
    """One layer's attention of a config with `latent`, on arrays of NumPy."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        assert config.latent is not None
        self._latent, self._config, self._index = config.latent, config, index
        at, latent = f"layers.{index}", config.latent
        query = "q" if latent.query_rank is None else "q_a"
        self._inputs = place_linear(
            weights, [f"{at}.{name}" for name in (query, "kv_latent", "k_rope")], inputs=0
        )
        self._query: tuple[Norm, Linear] | None = None
        if latent.query_rank is not None:
            norm = weights.vector(f"{at}.q_a_norm.weight")
            linear = place_linear(weights, [f"{at}.q_b"], inputs=0)
            self._query = Norm(weight=norm, eps=latent.norm_eps), linear
        norm = weights.vector(f"{at}.kv_norm.weight")
        self._norm = Norm(weight=norm, eps=latent.norm_eps)
        if latent.split:
            keys = [f"{at}.k_b.weight", f"{at}.v_b.weight"]
            self._up = Linear(weight=weights.computed(_joined, *keys), inputs=0)
        else:
            self._up = place_linear(weights, [f"{at}.kv_b"], inputs=0)
        self._o = place_linear(weights, [f"{at}.o"], inputs=0)

    def linears(self) -> Sequence[Linear]:
        return ()

    def __call__(self, step: Step, x: Float32, pool: KVPool) -> Float32:
        config, latent, ops = self._config, self._latent, step.ops
        q, c, rotated = self._inputs(step, x)
        if self._query is not None:
            norm, linear = self._query
            q, _ = norm(ops, q)
            (q,) = linear(step, q)
        c, _ = self._norm(ops, c)
        (kv,) = self._up(step, c)
        # What rotates leads a head here, and follows in the checkpoint.
        heads = (len(x), config.heads, -1)
        q, kv = q.reshape(heads), kv.reshape(heads)
        q = np.concatenate([q[..., latent.nope_dim :], q[..., : latent.nope_dim]], axis=-1)
        shared = np.broadcast_to(rotated[:, None], (*heads[:2], latent.rope_dim))
        k = np.concatenate([shared, kv[..., : latent.nope_dim]], axis=-1)
        x = ops.attention(
            q.reshape(len(x), -1),
            k.reshape(len(x), -1),
            kv[..., latent.nope_dim :].reshape(len(x), -1),
            batch=step.batch,
            pool=pool,
            layer=self._index,
            heads=config.heads,
            scale=config.attention_scale,
            rope=config.ropes[self._index],
        )
        (x,) = self._o(step, x)
        return x


def expanded(config: ModelConfig, latent: Latent) -> ModelConfig:
    """The config whose KV groups `ExpandedAttention` takes."""
    return dataclasses.replace(
        config,
        kv_heads=config.heads,
        head_dim=latent.nope_dim + latent.rope_dim,
        value_dim=latent.value_dim,
        latent=None,
    )


def _joined(keys: Float32, values: Float32) -> Sequence[Float32]:
    """What one tensor holds in other checkpoints: for each head, rows of keys and of values."""
    rows = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return [rows.reshape(-1, rows.shape[2])]
