"""Attention: heads are prepared and stored, then queries look at the context."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import pyopencl as cl
from polysilicon.backend import KV_LARGEST_CODE, DeviceError, KVScales, Normalization, Rope
from polysilicon.device_checks import check_indexes

from polysilicon_opencl.batches import QueryBlocks
from polysilicon_opencl.handles import vector_of
from polysilicon_opencl.pools import OpenCLKVPool
from polysilicon_opencl.values import Value

if TYPE_CHECKING:
    from polysilicon_opencl.ops import OpenCLOps

_KV_KINDS = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3, "fp8_e4m3": 4}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """One call of `Ops.attention`."""

    ops: OpenCLOps
    pool: OpenCLKVPool
    layer: int
    heads: int
    key_dim: int

    def __post_init__(self) -> None:
        keys, values = self.pool.plane("k"), self.pool.plane("v")
        if self.heads % keys.heads or self.key_dim != keys.dim or keys.heads != values.heads:
            raise ValueError(
                f"queries of {self.heads} heads of {self.key_dim} do not fit the pool's "
                f"{keys.heads} of {keys.dim}"
            )

    @property
    def key_heads(self) -> int:
        return self.pool.plane("k").heads

    @property
    def value_dim(self) -> int:
        return self.pool.plane("v").dim

    def prepare(
        self,
        q: Value,
        k: Value | None,
        v: Value | None,
        scale: float,
        rope: Rope | None,
        q_norm: Normalization | None,
        k_norm: Normalization | None,
        kv_scales: KVScales | None,
    ) -> Value:
        """Queries `[T, H * Dh]`, normed, rotated and scaled; keys and values go into the pool."""
        ops, step, runtime = self.ops, self.ops.current, self.ops.runtime
        self._check_batch()
        nothing = runtime.nothing
        table = None if rope is None else ops.rope_table(step.positions, rope)
        queries = ops.workspace.floats(q.rows, q.columns)
        keys, values = (q, q) if k is None or v is None else (k, v)
        calibrated = None if k is None else self._calibrated(kv_scales)
        stored_heads = 0 if k is None else 2 * self.key_heads
        kernel = runtime.kernel("attention_heads", "attention_heads", **self._macros())
        runtime.launch(
            kernel, self.heads + stored_heads, q.rows, q.buffer, q.at, q.stride, keys.buffer,
            keys.at, keys.stride, values.buffer, values.at, values.stride,
            nothing if q_norm is None else vector_of(q_norm.weight),
            -1.0 if q_norm is None else q_norm.eps,
            nothing if k_norm is None else vector_of(k_norm.weight),
            -1.0 if k_norm is None else k_norm.eps,
            nothing if table is None else table.buffer,
            0 if rope is None else len(rope.frequencies),
            int(rope is not None and rope.interleaved), step.buffer,
            step.slots_at[self.pool.spec.group], scale, self.heads, self.key_heads,
            queries.buffer, *self._planes(), nothing if calibrated is None else calibrated,
            int(calibrated is not None),
        )  # fmt: skip
        return queries

    def attend(
        self, queries: Value, *, softcap: float | None, sinks: cl.Buffer | None, causal: bool
    ) -> Value:
        """`[T, H * Dv]`."""
        ops, step, runtime = self.ops, self.ops.current, self.ops.runtime
        spec = self.pool.spec
        out = ops.workspace.floats(queries.rows, self.heads * self.value_dim)
        table_at, table_width = step.tables[spec.group]
        group = self.heads // self.key_heads
        for blocks in step.blocks:
            tokens, heads, chunk = self._shape(blocks.queries, group)
            kernel = runtime.kernel(
                "attention", "attention", QUERIES=tokens, HEADS=heads, CHUNK=chunk,
                **self._macros(),
            )  # fmt: skip
            parts = self.key_heads * math.ceil(group / heads)
            splits = self._splits(blocks, parts)
            partial = ops.workspace.take(
                4 * blocks.count * self.heads * splits * (self.value_dim + 2) if splits > 1 else 4
            )
            sink_arguments = (runtime.nothing if sinks is None else sinks, int(sinks is not None))
            runtime.launch(
                kernel, parts * splits, blocks.count, queries.buffer, step.buffer, table_at,
                table_width, blocks.at, step.positions_at, step.query_start_at, step.context_at,
                step.tree, step.tree_width, *self._planes(), self.heads, self.key_heads,
                spec.page_size, spec.window or 0, int(causal), softcap or 0.0, *sink_arguments,
                out.buffer, splits, partial.buffer,
            )  # fmt: skip
            if splits > 1:
                runtime.launch(
                    runtime.kernel(
                        "attention", "merge_splits", QUERIES=1, HEADS=1, CHUNK=16,
                        **self._macros(),
                    ),
                    self.heads, blocks.count, partial.buffer, splits, self.heads, step.buffer,
                    blocks.at, *sink_arguments, out.buffer,
                )  # fmt: skip
        return out

    def _splits(self, blocks: QueryBlocks, parts: int) -> int:
        """Work-groups that share the context of a decode: more where there are few otherwise."""
        if blocks.queries > 1:
            return 1
        tuning = self.ops.runtime.tuning
        context = int(self.ops.current.host.context_len.max())
        if self.pool.spec.window is not None:
            context = min(context, self.pool.spec.window)
        wanted = math.ceil(tuning.attention_groups / (blocks.count * parts))
        return max(1, min(wanted, context // tuning.split_context))

    def _shape(self, tokens: int, group: int) -> tuple[int, int, int]:
        """Tokens, query heads and keys that a work-group takes, within its local memory."""
        tuning = self.ops.runtime.tuning
        heads = min(group, max(1, tuning.attention_rows // tokens))
        chunk = tuning.chunk
        while heads > 1 and self._local_bytes(tokens * heads, chunk) > tuning.local_bytes:
            heads -= 1
        while chunk > 16 and self._local_bytes(tokens * heads, chunk) > tuning.local_bytes:
            chunk -= 16
        # Work-groups of equal parts of the group waste the fewest rows.
        return tokens, math.ceil(group / math.ceil(group / heads)), chunk

    def _local_bytes(self, rows: int, chunk: int) -> int:
        return 4 * (rows * (self.key_dim + self.value_dim + chunk + 3) + chunk)

    def _macros(self) -> dict[str, int]:
        vector = self.ops.runtime.tuning.vector
        return {
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "KV_KIND": _KV_KINDS[self.pool.plane("k").dtype],
            "VECTOR": math.gcd(vector, self.key_dim, self.value_dim),
        }

    def _planes(self) -> tuple[cl.Buffer, ...]:
        """Keys, values and their scales."""
        pool = self.pool
        names = ["k", "v"]
        if pool.plane("k").dtype in KV_LARGEST_CODE:
            names += ["k_scale", "v_scale"]
        nothing = self.ops.runtime.nothing
        planes = [pool.buffer(self.layer, name) for name in names]
        return (*planes, *[nothing] * (4 - len(planes)))

    def _calibrated(self, scales: KVScales | None) -> cl.Buffer | None:
        """Scales of keys, then of values, where the planes have a use for them."""
        if scales is None or self.pool.plane("k").dtype != "fp8_e4m3":
            return None
        for given in (scales.k, scales.v):
            if len(given) != self.key_heads:
                raise ValueError(f"{len(given)} KV scales do not fit {self.key_heads} key heads")
        return self.ops.constants(scales.k + scales.v)

    def _check_batch(self) -> None:
        """What the kernels rely on, once a step and pool."""
        step, pool, spec = self.ops.current, self.pool, self.pool.spec
        pool.check_open()
        if id(pool) in step.checked:
            return
        batch = step.host
        check_indexes("slots", batch.slots[spec.group], pool.slots)
        table = batch.page_tables[spec.group]
        check_indexes("pages", table, pool.pages)
        longest = int(batch.context_len.max(initial=0))
        if table.shape[1] * spec.page_size < longest:
            raise DeviceError(
                f"page tables of {table.shape[1]} pages end before a context of {longest} does"
            )
        counts = batch.query_start[1:] - batch.query_start[:-1]
        if (batch.context_len < counts).any():
            raise DeviceError("a sequence has more tokens in the step than in its context")
        if step.tree_width and step.tree_width < int(counts.max(initial=0)):
            raise DeviceError(
                f"the tree mask has {step.tree_width} columns for {counts.max()} tokens"
            )
        step.checked.add(id(pool))
