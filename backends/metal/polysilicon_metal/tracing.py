"""What a forward's ops share: the step's arrays, and the pools as the forward leaves them."""

from __future__ import annotations

import copy
import dataclasses

import mlx.core as mx
import numpy as np

from polysilicon.backend import Batch, Rope
from polysilicon_metal import pools
from polysilicon_metal.adapters import Key as AdapterKey
from polysilicon_metal.adapters import MetalAdapterPool
from polysilicon_metal.attention import Keys, QueryBlocks, visible_keys


@dataclasses.dataclass(kw_only=True, eq=False)
class Trace:
    """One run of a forward, over arrays or over MLX's placeholders for them.

    blocks: the step's queries for attention. token_slot: int32 `[T]`, each token's adapter slot,
    None where the step has no adapters. kv, adapters: the pools' arrays, those that the forward
    has assigned to included. A pool that is not in them yet is asked for its own arrays.
    vocabulary: rows of the smallest table that tokens were looked up in.
    """

    blocks: tuple[QueryBlocks, ...]
    token_slot: mx.array | None
    kv: dict[pools.MetalKVPool, dict[pools.Key, mx.array]]
    adapters: dict[MetalAdapterPool, dict[AdapterKey, mx.array]]
    vocabulary: int | None = None
    _angles: dict[tuple[int, Rope], tuple[mx.array, mx.array]] = dataclasses.field(
        default_factory=dict
    )
    _visible: dict[tuple[int, int, int | None, bool], tuple[mx.array, mx.array]] = (
        dataclasses.field(default_factory=dict)
    )

    def planes(self, pool: pools.MetalKVPool) -> dict[pools.Key, mx.array]:
        """The arrays of a pool as the forward sees them, to be assigned to."""
        if pool not in self.kv:
            pool.check_open()
            self.kv[pool] = dict(pool.arrays)
        return self.kv[pool]

    def keys(self, pool: pools.MetalKVPool, place: int) -> Keys:
        planes = self.planes(pool)
        return Keys(
            k=planes[place, "k"],
            v=planes[place, "v"],
            k_scale=planes.get((place, "k_scale")),
            v_scale=planes.get((place, "v_scale")),
        )

    def store(
        self, pool: pools.MetalKVPool, place: int, name: str, slots: mx.array, rows: mx.array
    ) -> None:
        """Write rows `[T, heads, dim]` of a plane at slots `[T]`, rounded to its dtype."""
        planes = self.planes(pool)
        array = copy.copy(planes[place, name])
        array[slots] = rows.astype(array.dtype)
        planes[place, name] = array

    def factors(self, pool: MetalAdapterPool, target: str) -> list[tuple[mx.array, mx.array]]:
        """A and B of each part of a target."""
        if pool not in self.adapters:
            pool.check_open()
            self.adapters[pool] = dict(pool.arrays)
        arrays = self.adapters[pool]
        return [
            (arrays[target, part, "down"], arrays[target, part, "up"])
            for part in range(pool.parts_of(target))
        ]

    def angles(self, positions: mx.array, rope: Rope) -> tuple[mx.array, mx.array]:
        """Cosines and sines float32 `[T, 1, dim / 2]`, the same for all layers."""
        key = (id(positions), rope)
        if key not in self._angles:
            frequencies = mx.array(np.asarray(rope.frequencies, np.float32))
            angles = positions.astype(mx.float32)[:, None, None] * frequencies
            self._angles[key] = mx.cos(angles) * rope.scale, mx.sin(angles) * rope.scale
        return self._angles[key]

    def visible(
        self, batch: Batch, number: int, context: int, *, window: int | None, causal: bool
    ) -> tuple[mx.array, mx.array]:
        """What the blocks of this number see, the same for all layers of a kind."""
        key = (number, context, window, causal)
        if key not in self._visible:
            self._visible[key] = visible_keys(
                batch, self.blocks[number], context, window=window, causal=causal
            )
        return self._visible[key]
