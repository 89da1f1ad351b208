"""Single attentions, outside of any program: for tests and benchmarks."""

from __future__ import annotations

import ctypes
import functools
import time
from ctypes import POINTER, c_bool, c_float, c_int, c_void_p

import numpy as np

from polysilicon.backend import Batch, KVScales, Rope
from polysilicon_cpu import library
from polysilicon_cpu.arrays import Array, Float32, address
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.pools import CPUKVPool

_ERROR = POINTER(library.ErrorText)


@functools.cache
def _native() -> ctypes.CDLL:
    native = library.load()
    native.ps_rope_create.restype = c_void_p
    native.ps_rope_create.argtypes = (c_void_p, c_int, c_float, c_bool)
    native.ps_rope_destroy.restype = None
    native.ps_rope_destroy.argtypes = (c_void_p,)
    native.ps_attention.restype = c_bool
    native.ps_attention.argtypes = (
        c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
        POINTER(library.AttentionParameters), c_int, c_void_p, _ERROR,
    )  # fmt: skip
    return native


class Attention:
    """What stays the same over calls: pool, heads and parameters as `Ops.attention` has them.

    q_norm, k_norm: weights `[Dh]` with their eps. exact: products of float32 in every case.
    """

    def __init__(
        self,
        device: CPUDevice,
        pool: CPUKVPool,
        *,
        heads: int,
        scale: float,
        rope: Rope | None = None,
        q_norm: tuple[Float32, float] | None = None,
        k_norm: tuple[Float32, float] | None = None,
        softcap: float | None = None,
        sinks: Float32 | None = None,
        causal: bool = True,
        exact: bool = False,
        kv_scales: KVScales | None = None,
    ) -> None:
        self._device = device
        self._pool = pool
        self._heads = heads
        self._kept: tuple[object, ...] = (q_norm, k_norm, sinks)
        self._rope = rope
        self._parameters = library.AttentionParameters(
            heads=heads, scale=scale, softcap=softcap or 0, causal=causal, exact=exact
        )
        if q_norm is not None:
            self._parameters.q_norm, self._parameters.q_eps = address(q_norm[0]), q_norm[1]
        if k_norm is not None:
            self._parameters.k_norm, self._parameters.k_eps = address(k_norm[0]), k_norm[1]
        if sinks is not None:
            self._parameters.sinks = address(sinks)
        if kv_scales is not None:
            scales = np.array([kv_scales.k, kv_scales.v], np.float32)
            self._kept = (*self._kept, scales)
            self._parameters.key_scales = address(scales[0])
            self._parameters.value_scales = address(scales[1])

    def __call__(
        self, q: Float32, k: Float32 | None, v: Float32 | None, batch: Batch, layer: int
    ) -> Float32:
        """float32 `[T, H * Dv]`."""
        return self._run(q, k, v, batch, layer, 1)

    def seconds(
        self,
        q: Float32,
        k: Float32 | None,
        v: Float32 | None,
        batch: Batch,
        layer: int,
        repeats: int,
    ) -> float:
        """Of one call, averaged over `repeats` that follow each other."""
        begin = time.perf_counter()
        self._run(q, k, v, batch, layer, repeats)
        return (time.perf_counter() - begin) / repeats

    def _run(
        self,
        q: Float32,
        k: Float32 | None,
        v: Float32 | None,
        batch: Batch,
        layer: int,
        repeats: int,
    ) -> Float32:
        native, group = _native(), self._pool.spec.group
        planes = {plane.name: plane for plane in self._pool.spec.planes}
        assert q.shape == (len(batch.tokens), self._heads * planes["k"].dim)
        groups = (library.GroupView * len(batch.page_tables))()
        groups[group].page_table = address(batch.page_tables[group])
        groups[group].width = batch.page_tables[group].shape[1]
        groups[group].slots = address(batch.slots[group])
        view = library.StepArguments(
            token_count=len(batch.tokens),
            sequence_count=len(batch.context_len),
            group_count=len(groups),
            positions=address(batch.positions),
            query_start=address(batch.query_start),
            context_len=address(batch.context_len),
            groups=ctypes.cast(groups, c_void_p),
        )
        if batch.tree_mask is not None:
            view.tree_mask = address(batch.tree_mask)
            view.tree_width = batch.tree_mask.shape[1]
        table = None
        if self._rope is not None:
            frequencies = np.array(self._rope.frequencies, np.float64)
            table = native.ps_rope_create(
                address(frequencies), len(frequencies), self._rope.scale, self._rope.interleaved
            )
        self._parameters.rope = table
        result = np.full((len(q), self._heads * planes["v"].dim), np.nan, np.float32)
        error = library.ErrorText()
        done = native.ps_attention(
            self._device.pointer, self._pool.pointer, self._pool.layer_place(layer),
            address(q), _address(k), _address(v), ctypes.byref(view), table,
            ctypes.byref(self._parameters), repeats, address(result), ctypes.byref(error),
        )  # fmt: skip
        if table is not None:
            native.ps_rope_destroy(table)
        if not done:
            library.raise_error(error)
        return result


def _address(array: Array | None) -> int | None:
    return None if array is None else address(array)
