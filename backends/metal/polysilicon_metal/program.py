"""Compiled forwards and their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from polysilicon.backend import Batch, DeviceError, Forward, Outputs, PendingTokens
from polysilicon.device_checks import check_indexes
from polysilicon_metal.adapters import MetalAdapterPool
from polysilicon_metal.arrays import bucket, fine_bucket, padded, to_host
from polysilicon_metal.attention import QueryBlocks
from polysilicon_metal.ops import MetalOps
from polysilicon_metal.plan import Blocks, make_blocks
from polysilicon_metal.pools import MetalKVPool
from polysilicon_metal.queue import Stage
from polysilicon_metal.sampling import MetalPendingTokens
from polysilicon_metal.tracing import Trace

if TYPE_CHECKING:
    from polysilicon_metal.device import MetalDevice

Tree = Any
"""Arrays in lists, tuples and dicts, as MLX compiles over them."""

Kind = tuple[tuple[int, ...], bool, bool]
"""What a compiled forward is made for beside shapes, for each of which MLX traces it again: the
contexts of the blocks, whether the step has adapters, and whether it has a tree mask."""


class PendingStep:
    """A step's outputs. logits: `[L, V]`, L a bucket of `rows`; hidden: by layer, `[T, D]`."""

    def __init__(
        self,
        device: MetalDevice,
        stage: Stage,
        logits: mx.array,
        hidden: dict[int, mx.array],
        *,
        rows: int,
        tokens: int,
    ) -> None:
        self.device = device
        self.logits = logits
        self.rows = rows
        self._stage = stage
        self._hidden = hidden
        self._tokens = tokens

    def result(self) -> Outputs:
        self.device.wait(self._stage)
        with self.device.active():
            return Outputs(
                logits=to_host(self.logits)[: self.rows],
                hidden={
                    layer: to_host(values)[: self._tokens] for layer, values in self._hidden.items()
                },
            )


class MetalProgram:
    """A forward, compiled by MLX for every bucket of shapes that steps come in."""

    def __init__(self, device: MetalDevice, forward: Forward, hidden: Sequence[int]) -> None:
        self._device = device
        self._forward = forward
        self._hidden = tuple(hidden)
        self._compiled: dict[Kind, Any] = {}
        self._pools: tuple[MetalKVPool, ...] | None = None
        self._adapter_pools: tuple[MetalAdapterPool, ...] = ()
        self._vocabulary: int | None = None

    def __call__(self, batch: Batch, previous: PendingTokens | None) -> PendingStep:
        device = self._device
        device.check_open()
        with device.active():
            device.queue.check()
            tokens = fine_bucket(len(batch.tokens))
            blocks = make_blocks(batch, tokens)
            inputs = self._inputs(batch, blocks, tokens)
            inputs["tokens"] = self._tokens(batch, previous, tokens)
            contexts = tuple(block.context for block in blocks)
            if self._pools is None:
                self._discover(inputs, contexts)
            self._check(batch)
            return self._submit(batch, inputs, contexts)

    def release(self) -> None:
        """Let go of what was compiled: the device is closed."""
        self._compiled = {}

    def _submit(self, batch: Batch, inputs: Tree, contexts: tuple[int, ...]) -> PendingStep:
        assert self._pools is not None
        for pool in self._pools:
            pool.check_open()
        for adapter_pool in self._adapter_pools:
            adapter_pool.check_open()
        logits, hidden, kv = self._compiled_for(contexts, inputs)(
            inputs,
            [pool.arrays for pool in self._pools],
            [pool.arrays for pool in self._adapter_pools],
        )
        arrays = [logits, *hidden]
        for pool, planes in zip(self._pools, kv, strict=True):
            pool.arrays = planes
            pool.dirty = False
            arrays += planes.values()
        stage = self._device.queue.add(Stage(arrays=arrays, writes=True))
        return PendingStep(
            self._device,
            stage,
            logits,
            dict(zip(self._hidden, hidden, strict=True)),
            rows=len(batch.logit_rows),
            tokens=len(batch.tokens),
        )

    def _compiled_for(self, contexts: tuple[int, ...], inputs: Tree) -> Any:
        kind = (contexts, "token_slot" in inputs, "tree_mask" in inputs)
        if kind not in self._compiled:
            pools, adapter_pools = self._pools, self._adapter_pools
            assert pools is not None

            def run(inputs: Tree, kv: Tree, adapters: Tree) -> Tree:
                trace = self._trace(inputs, contexts)
                trace.kv = {p: dict(own) for p, own in zip(pools, kv, strict=True)}
                trace.adapters = dict(zip(adapter_pools, adapters, strict=True))
                logits, hidden = self._run(trace, inputs)
                return logits, hidden, [trace.kv[pool] for pool in pools]

            self._compiled[kind] = self._device.compiled(run)
        return self._compiled[kind]

    def _discover(self, inputs: Tree, contexts: tuple[int, ...]) -> None:
        """Find the pools that the forward uses: run it over arrays that nobody evaluates."""
        trace = self._trace(inputs, contexts)
        self._run(trace, inputs)
        self._pools = tuple(trace.kv)
        self._adapter_pools = tuple(trace.adapters)
        self._vocabulary = trace.vocabulary

    def _trace(self, inputs: Tree, contexts: tuple[int, ...]) -> Trace:
        blocks = tuple(
            QueryBlocks(rows=rows, sequences=sequences, context=context)
            for (rows, sequences), context in zip(inputs["blocks"], contexts, strict=True)
        )
        return Trace(blocks=blocks, token_slot=inputs.get("token_slot"), kv={}, adapters={})

    def _run(self, trace: Trace, inputs: Tree) -> tuple[mx.array, list[mx.array]]:
        batch = Batch(
            tokens=inputs["tokens"],
            token_source=inputs["tokens"],
            positions=inputs["positions"],
            query_start=inputs["query_start"],
            context_len=inputs["context_len"],
            page_tables=tuple(inputs["page_tables"]),
            slots=tuple(inputs["slots"]),
            logit_rows=inputs["logit_rows"],
            sequence_slot=inputs["sequence_slot"],
            adapter_slot=inputs["adapter_slot"],
            tree_mask=inputs.get("tree_mask"),
        )
        outputs = self._forward(MetalOps(trace), batch)
        hidden = [outputs.hidden[layer].astype(mx.float32) for layer in self._hidden]
        return outputs.logits.astype(mx.float32), hidden

    def _inputs(self, batch: Batch, blocks: tuple[Blocks, ...], tokens: int) -> dict[str, Tree]:
        """The step's arrays on the device, padded: tokens of padding belong to no sequence and are
        stored in page 0."""
        sequences = bucket(len(batch.context_len))
        rows = bucket(len(batch.logit_rows))
        inputs: dict[str, Tree] = {
            "positions": _device(batch.positions, tokens),
            "query_start": _device(batch.query_start, sequences + 1, len(batch.tokens)),
            "context_len": _device(batch.context_len, sequences),
            "logit_rows": _device(batch.logit_rows, rows),
            "sequence_slot": _device(batch.sequence_slot, sequences),
            "adapter_slot": _device(batch.adapter_slot, sequences),
            "slots": [_device(slots, tokens) for slots in batch.slots],
            "page_tables": [_table(table, sequences) for table in batch.page_tables],
            "blocks": [(mx.array(block.rows), mx.array(block.sequences)) for block in blocks],
        }
        if batch.tree_mask is not None:
            mask = batch.tree_mask
            wide = np.zeros((tokens, bucket(mask.shape[1])), np.bool_)
            wide[: len(mask), : mask.shape[1]] = mask
            inputs["tree_mask"] = mx.array(wide)
        if batch.adapter_slot.any():
            per_token = np.repeat(batch.adapter_slot, np.diff(batch.query_start))
            inputs["token_slot"] = _device(per_token, tokens)
        return inputs

    def _tokens(self, batch: Batch, previous: PendingTokens | None, size: int) -> mx.array:
        """The input tokens, those of the previous step filled in where `token_source` says so."""
        taken = batch.token_source >= 0
        own = _device(np.where(taken, 0, batch.tokens).astype(np.int32), size)
        if not taken.any():
            return own
        if not isinstance(previous, MetalPendingTokens):
            raise ValueError(
                "token_source names rows of a previous step, but `previous` is not what this "
                "device's sample returned"
            )
        check_indexes("token_source", batch.token_source[taken], previous.rows)
        source = _device(batch.token_source, size, -1)
        return mx.where(source >= 0, previous.tokens[mx.maximum(source, 0)], own)

    def _check(self, batch: Batch) -> None:
        """What would read or write outside of an array. Raises DeviceError."""
        assert self._pools is not None
        check_indexes("logit_rows", batch.logit_rows, len(batch.tokens))
        if self._vocabulary is not None:
            own = batch.tokens[batch.token_source < 0]
            check_indexes("tokens", own, self._vocabulary)
        for pool in self._pools:
            group, size = pool.spec.group, pool.spec.page_size
            check_indexes("slots", batch.slots[group], pool.slots)
            check_indexes("pages", batch.page_tables[group], pool.pages)
            if batch.page_tables[group].shape[1] * size < batch.context_len.max(initial=0):
                raise DeviceError(f"a page table of group {group} ends before its context does")
        for adapter_pool in self._adapter_pools:
            check_indexes("adapter slots", batch.adapter_slot, adapter_pool.slots)


def _device(array: npt.NDArray[np.int32], size: int, fill: int = 0) -> mx.array:
    return mx.array(padded(np.asarray(array, np.int32), size, fill))


def _table(table: npt.NDArray[np.int32], rows: int) -> mx.array:
    result = np.zeros((rows, bucket(table.shape[1])), np.int32)
    result[: len(table), : table.shape[1]] = table
    return mx.array(result)
