"""A bench for attention: random queries, keys and values by token, real pages, a float64 oracle."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import (
    KV_DTYPES,
    KV_LARGEST_CODE,
    Batch,
    KVScales,
    KVSpec,
    Normalization,
    Ops,
    Plane,
    Rope,
    kv_planes,
)
from polysilicon.testing import oracles
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import STORE_BOUNDS, Float64, Kit, as_forward, assert_close

_EPS = 0.1
"""Of the q and k norms: large enough that leaving it out shows."""

_GARBAGE = 100.0
"""Magnitude of what stands in every page before a test, far above what tests write."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """What `Ops.attention` is asked for. kv_dtype and page_size: the device's most precise and its
    preferred one when None. value_dim: dim when None."""

    heads: int = 4
    key_heads: int = 2
    dim: int = 64
    value_dim: int | None = None
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True
    rope: Rope | None = None
    q_norm: bool = False
    k_norm: bool = False
    kv_dtype: str | None = None
    kv_scales: KVScales | None = None
    page_size: int | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Context:
    """A sequence: its pages, and the tokens whose KV it has, with their positions."""

    pages: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Extension:
    """What a context does in a step: `tokens` more of them.

    positions: as `Chunk.positions`. tree: as `Chunk.tree`.
    behind: pages at the start of the table that are given as 0, as behind a window.
    """

    context: Context
    tokens: Sequence[int]
    positions: Sequence[int] | None = None
    tree: npt.NDArray[np.bool_] | None = None
    behind: int = 0


class AttentionBench:
    """A KV pool full of garbage, and `vocabulary` tokens with a query, a key and a value each."""

    def __init__(
        self,
        kit: Kit,
        case: AttentionCase,
        *,
        pages: int = 24,
        vocabulary: int = 200,
        group: int = 0,
    ) -> None:
        capabilities = kit.capabilities
        self.kit = kit
        self.case = case
        self.vocabulary = vocabulary
        self.page_size = case.page_size or capabilities.page_sizes[0]
        precise = min(capabilities.kv_dtypes, key=lambda name: STORE_BOUNDS[name])
        self.kv_dtype = case.kv_dtype or precise
        self.value_dim = case.value_dim or case.dim
        self.scale = case.scale or case.dim**-0.5
        self.q, self.q_values = kit.dense(kit.normal(vocabulary, case.heads * case.dim))
        self.k, self.k_values = kit.dense(kit.normal(vocabulary, case.key_heads * case.dim))
        self.v, self.v_values = kit.dense(kit.normal(vocabulary, case.key_heads * self.value_dim))
        self.sinks, self.sink_values = kit.dense(kit.normal(case.heads, scale=2))
        self.q_norm, self.q_norm_values = kit.dense(1 + kit.normal(case.dim, scale=0.3))
        self.k_norm, self.k_norm_values = kit.dense(1 + kit.normal(case.dim, scale=0.3))
        self.spec = KVSpec(
            group=group,
            name="bench",
            layers=(1, 3),
            window=case.window,
            planes=kv_planes(
                heads=case.key_heads,
                key_dim=case.dim,
                value_dim=self.value_dim,
                dtype=self.kv_dtype,
            ),
            page_size=self.page_size,
        )
        self.pool = kit.device.kv_pool(self.spec, pages)
        self._free = [int(page) for page in kit.rng.permutation(np.arange(1, pages))]
        self._program = kit.device.compile(as_forward(self.forward))
        self._fill_with_garbage()

    def context(self, capacity: int) -> Context:
        """A sequence with scattered pages for `capacity` tokens."""
        count = -(-capacity // self.page_size)
        pages, self._free = self._free[:count], self._free[count:]
        assert len(pages) == count, "the bench has too few pages for this test"
        return Context(pages=pages)

    def another_pool(self) -> AttentionBench:
        """A bench of the same tokens whose pool is another one."""
        other = copy.copy(self)
        other.pool = self.kit.device.kv_pool(self.spec, self.pool.pages)
        other._free = list(reversed(range(1, self.pool.pages)))
        other._program = self.kit.device.compile(as_forward(other.forward))
        return other

    def random_tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.kit.rng.integers(0, self.vocabulary, count)]

    def forward(self, ops: Ops, batch: Batch, *, store: bool = True, layer: int = 3) -> Any:
        """One attention; its keys and values are left out without `store`."""
        case = self.case
        return ops.attention(
            ops.embed(self.q, batch.tokens),
            ops.embed(self.k, batch.tokens) if store else None,
            ops.embed(self.v, batch.tokens) if store else None,
            batch=batch,
            pool=self.pool,
            layer=layer,
            heads=case.heads,
            scale=self.scale,
            rope=case.rope,
            q_norm=Normalization(weight=self.q_norm, eps=_EPS) if case.q_norm else None,
            k_norm=Normalization(weight=self.k_norm, eps=_EPS) if case.k_norm else None,
            softcap=case.softcap,
            sinks=self.sinks if case.sinks else None,
            causal=case.causal,
            **({} if case.kv_scales is None else {"kv_scales": case.kv_scales}),
        )

    def batch(self, extensions: Sequence[Extension]) -> Batch:
        """The step's batch; the contexts are not extended yet."""
        return make_batch(
            [
                Chunk(
                    tokens=extension.tokens,
                    start=len(extension.context.tokens),
                    pages=(extension.context.pages,),
                    positions=extension.positions,
                    tree=extension.tree,
                )
                for extension in extensions
            ],
            (self.page_size,),
        )

    def step(self, extensions: Sequence[Extension]) -> None:
        """Run one step over the extensions and hold its outputs to the oracle's."""
        batch = self.batch(extensions)
        for row, extension in enumerate(extensions):
            batch.page_tables[0][row, : extension.behind] = 0
        actual = self._program(batch, None).result().logits
        expected = np.concatenate([self.extend(extension) for extension in extensions])
        assert_close(actual, expected, self.bound)

    @property
    def bound(self) -> float:
        """The compute bound. Rotated, normed and quantised keys may round to either neighbour."""
        bound = self.kit.bound
        if self.case.rope is not None:
            bound += oracles.angle_error(500)
        if self.case.rope is not None or self.case.k_norm or self.kv_dtype in KV_LARGEST_CODE:
            bound += STORE_BOUNDS[self.kv_dtype]
        return bound

    def extend(self, extension: Extension) -> Float64:
        """Add the tokens to their context; the expected outputs of their queries."""
        context = extension.context
        before = len(context.tokens)
        count = len(extension.tokens)
        positions = list(extension.positions or range(before, before + count))
        context.tokens += extension.tokens
        context.positions += positions
        queries = self._prepared(
            self.q_values, extension.tokens, positions, self.case.heads,
            self.q_norm_values if self.case.q_norm else None,
        )  # fmt: skip
        visible = np.zeros((count, before + count), np.bool_)
        for row in range(count):
            for index in range(before + count):
                visible[row, index] = self._is_visible(extension, before, row, index)
        return oracles.attend(
            queries,
            self.stored_keys(context),
            self.stored_values(context),
            visible,
            scale=self.scale,
            softcap=self.case.softcap,
            sinks=self.sink_values if self.case.sinks else None,
        )

    def stored_keys(self, context: Context) -> Float64:
        """`[C, Hk, Dh]`: normed, rotated, rounded to the KV dtype."""
        keys = self._prepared(
            self.k_values, context.tokens, context.positions, self.case.key_heads,
            self.k_norm_values if self.case.k_norm else None,
        )  # fmt: skip
        scales = self.case.kv_scales
        return oracles.stored(keys, self.kv_dtype, None if scales is None else scales.k)

    def stored_values(self, context: Context) -> Float64:
        """`[C, Hk, Dv]`: rounded to the KV dtype."""
        rows = self.v_values[context.tokens]
        values = rows.reshape(-1, self.case.key_heads, self.value_dim)
        scales = self.case.kv_scales
        return oracles.stored(values, self.kv_dtype, None if scales is None else scales.v)

    def _prepared(
        self,
        table: Float64,
        tokens: Sequence[int],
        positions: Sequence[int],
        heads: int,
        norm: Float64 | None,
    ) -> Float64:
        x = table[list(tokens)].reshape(-1, heads, self.case.dim)
        if norm is not None:
            x = oracles.rms_norm(x, norm, _EPS)
        return x if self.case.rope is None else oracles.rotate(x, positions, self.case.rope)

    def _is_visible(self, extension: Extension, before: int, row: int, index: int) -> bool:
        """Whether the step's `row`-th token sees the `index`-th of its context."""
        positions = extension.context.positions
        if self.case.window is not None:
            key_position = index if index < before else positions[index]
            if key_position <= positions[before + row] - self.case.window:
                return False
        if index < before:
            return True
        if extension.tree is not None:
            return bool(extension.tree[row, index - before])
        return not self.case.causal or index - before <= row

    def _fill_with_garbage(self) -> None:
        """Write large values into every slot of every layer, page 0 included."""
        spec = self.spec
        count = self.pool.pages * spec.page_size // spec.block
        parts = [np.tile(np.frombuffer(spec.block_header(), np.uint8), (count, 1))]
        for plane in spec.planes * len(spec.layers):
            values = self._garbage(plane, count * plane.heads * spec.block * plane.dim)
            parts.append(values.view(np.uint8).reshape(count, -1))
        pages = range(self.pool.pages)
        self.pool.write(pages, np.hstack(parts).reshape(len(pages), -1, spec.block_bytes)).result()

    def _garbage(self, plane: Plane, size: int) -> npt.NDArray[Any]:
        """Values, or codes or the scales that they are multiplied by."""
        dtype = KV_DTYPES[plane.dtype]
        largest = KV_LARGEST_CODE.get(self.kv_dtype, _GARBAGE)
        if dtype != KV_DTYPES[self.kv_dtype]:
            return np.full(size, _GARBAGE / largest, dtype)
        return self.kit.rng.choice(np.array([-largest, largest], np.float32), size).astype(dtype)


def skip_without_kv_scales(kit: Kit) -> None:
    if not kit.capabilities.kv_scales:
        pytest.skip("declares no calibrated KV scales")


def skip_without_tree_attention(kit: Kit) -> None:
    if not kit.capabilities.tree_attention:
        pytest.skip("declares no tree attention")
