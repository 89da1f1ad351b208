"""The device: places weights, keeps pools, runs forwards at once."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    AdapterSpec,
    Batch,
    Capabilities,
    Device,
    DeviceError,
    Forward,
    KVSpec,
    MemoryInfo,
    OutOfMemory,
    Outputs,
    PendingOutputs,
    PendingTokens,
    SampledTokens,
    SamplingBatch,
    Shard,
    Weight,
    sample_on_host,
)
from polysilicon.device_checks import check_adapter_spec, check_indexes, check_kv_spec
from polysilicon.host_memory import check_fits, free_memory, total_memory
from polysilicon.reference.ceilings import ceilings
from polysilicon.reference.handles import ReferenceHandle, place, placed_bytes
from polysilicon.reference.ops import ReferenceOps
from polysilicon.reference.pools import (
    Completed,
    ReferenceAdapterPool,
    ReferenceKVPool,
)


class ReferenceDevice(Device):
    """One numpy device. Every call computes before it returns, so results are never outstanding."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            compute="f32",
            kv_dtypes=("f32", "f16", "bf16", "int8", "fp8_e4m3"),
            page_sizes=(16, 32, 64, 128, *range(1, 16)),
            encodings=("*",),
            adapters=256,
            max_adapter_rank=256,
            tree_attention=True,
            kv_scales=True,
        )
        self.ops = ReferenceOps()
        self.closed = False
        self._handles: weakref.WeakSet[ReferenceHandle] = weakref.WeakSet()
        self._kv_pools: weakref.WeakSet[ReferenceKVPool] = weakref.WeakSet()
        self._adapter_pools: weakref.WeakSet[ReferenceAdapterPool] = weakref.WeakSet()

    def put(self, parts: Sequence[Weight], shard: Shard | None = None) -> ReferenceHandle:
        self.check_open()
        check_fits("weights", placed_bytes(parts, shard))
        handle = place(parts, shard)
        self._handles.add(handle)
        return handle

    def kv_pool(self, spec: KVSpec, pages: int) -> ReferenceKVPool:
        self.check_open()
        check_kv_spec(spec, self.capabilities)
        check_fits("KV pages", spec.page_bytes * pages)
        pool = ReferenceKVPool(spec, pages)
        self._kv_pools.add(pool)
        return pool

    def adapter_pool(self, spec: AdapterSpec, slots: int) -> ReferenceAdapterPool:
        self.check_open()
        check_adapter_spec(spec, slots, self.capabilities)
        pool = ReferenceAdapterPool(spec, slots)
        self._adapter_pools.add(pool)
        return pool

    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> ReferenceProgram:
        self.check_open()
        return ReferenceProgram(self, forward, tuple(hidden))

    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> PendingTokens:
        self.check_open()
        return Completed(sample_on_host(pending.result().logits, batch))

    def memory(self) -> MemoryInfo:
        return MemoryInfo(
            total=total_memory(),
            free=free_memory(),
            used={
                "weights": sum(handle.nbytes for handle in self._handles),
                "kv": sum(pool.nbytes for pool in self._kv_pools),
                "adapters": sum(pool.nbytes for pool in self._adapter_pools),
            },
        )

    def ceilings(self, nbytes: int) -> Mapping[str, float]:
        self.check_open()
        check_fits("a working set to measure", nbytes)
        return ceilings(nbytes)

    def close(self) -> None:
        self.closed = True
        for kv_pool in self._kv_pools:
            kv_pool.close()
        for adapter_pool in self._adapter_pools:
            adapter_pool.close()
        for handle in self._handles:
            handle.array = handle.array[:0].copy()

    def check_open(self) -> None:
        if self.closed:
            raise DeviceError("the device is closed")


class ReferenceProgram:
    """A forward, run on the spot."""

    def __init__(self, device: ReferenceDevice, forward: Forward, hidden: tuple[int, ...]) -> None:
        self._device = device
        self._forward = forward
        self._hidden = hidden

    def __call__(self, batch: Batch, previous: PendingTokens | None) -> Completed[Outputs]:
        self._device.check_open()
        tokens = _input_tokens(batch, None if previous is None else previous.result())
        try:
            with np.errstate(all="ignore"):
                outputs = self._forward(self._device.ops, dataclasses.replace(batch, tokens=tokens))
        except MemoryError as error:
            raise OutOfMemory(f"a step of {len(tokens)} tokens: {error}") from error
        return Completed(
            Outputs(
                logits=np.ascontiguousarray(outputs.logits, np.float32),
                hidden={layer: outputs.hidden[layer] for layer in self._hidden},
            )
        )


def _input_tokens(batch: Batch, sampled: SampledTokens | None) -> npt.NDArray[np.int32]:
    """The batch's tokens, those of the previous step filled in where `token_source` names a row."""
    taken = batch.token_source >= 0
    if not taken.any():
        return batch.tokens
    if sampled is None:
        raise ValueError("token_source names rows of a previous step, but there is none")
    rows = batch.token_source[taken]
    check_indexes("token_source", rows, len(sampled.tokens))
    tokens = batch.tokens.copy()
    tokens[taken] = sampled.tokens[rows]
    return tokens
