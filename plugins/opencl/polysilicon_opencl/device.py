"""The device: everything that was placed on it, and its queue."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import pyopencl as cl
from polysilicon.backend import (
    AdapterSpec,
    Capabilities,
    Device,
    Forward,
    KVSpec,
    MemoryInfo,
    PendingOutputs,
    PendingTokens,
    SamplingBatch,
    Shard,
    Weight,
)
from polysilicon.device_checks import check_adapter_spec, check_kv_spec

from polysilicon_opencl import handles, sampling, tuning
from polysilicon_opencl.adapters import OpenCLAdapterPool
from polysilicon_opencl.ceilings import ceilings
from polysilicon_opencl.handles import MatrixHandle, VectorHandle
from polysilicon_opencl.ops import OpenCLOps
from polysilicon_opencl.options import Options
from polysilicon_opencl.pools import OpenCLKVPool
from polysilicon_opencl.program import OpenCLProgram, PendingStep
from polysilicon_opencl.runtime import Runtime
from polysilicon_opencl.values import Workspace


class OpenCLDevice(Device):
    """One in-order queue: calls take effect in the order in which they are enqueued."""

    ops: OpenCLOps

    def __init__(self, device: cl.Device, options: Options) -> None:
        self.capabilities = Capabilities(
            compute="f32",
            kv_dtypes=("f16", "f32", "bf16", "int8", "fp8_e4m3"),
            page_sizes=(16, 32, 64, 128, 1, 2, 4, 8),
            encodings=("*",),
            adapters=256,
            max_adapter_rank=256,
            tree_attention=True,
            kv_scales=True,
        )
        self.runtime = Runtime(device, tuning.choose(device, options.shapes))
        self.workspace = Workspace(self.runtime)
        self.ops = OpenCLOps(self.runtime, self.workspace)
        self._handles: weakref.WeakSet[MatrixHandle | VectorHandle] = weakref.WeakSet()
        self._kv_pools: weakref.WeakSet[OpenCLKVPool] = weakref.WeakSet()
        self._adapter_pools: weakref.WeakSet[OpenCLAdapterPool] = weakref.WeakSet()

    def put(
        self, parts: Sequence[Weight], shard: Shard | None = None
    ) -> MatrixHandle | VectorHandle:
        self.runtime.check_open()
        handle = handles.place(self.runtime, parts, shard)
        self._handles.add(handle)
        self.runtime.allocated += handle.nbytes
        weakref.finalize(handle, self.runtime.forget, handle.nbytes).atexit = False
        return handle

    def kv_pool(self, spec: KVSpec, pages: int) -> OpenCLKVPool:
        self.runtime.check_open()
        check_kv_spec(spec, self.capabilities)
        pool = OpenCLKVPool(self.runtime, self.workspace, spec, pages)
        self._kv_pools.add(pool)
        return pool

    def adapter_pool(self, spec: AdapterSpec, slots: int) -> OpenCLAdapterPool:
        self.runtime.check_open()
        check_adapter_spec(spec, slots, self.capabilities)
        pool = OpenCLAdapterPool(self.runtime, spec, slots)
        self._adapter_pools.add(pool)
        return pool

    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> OpenCLProgram:
        self.runtime.check_open()
        return OpenCLProgram(self, forward, hidden)

    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> PendingTokens:
        self.runtime.check_open()
        if not isinstance(pending, PendingStep) or pending.device is not self:
            raise ValueError("sample takes what a program of the same device returned")
        return sampling.sample(pending, batch)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(
            total=self.runtime.total,
            free=self.runtime.free,
            used={
                "weights": sum(handle.nbytes for handle in self._handles),
                "kv": sum(pool.nbytes for pool in self._kv_pools),
                "adapters": sum(pool.nbytes for pool in self._adapter_pools),
                "workspace": self.workspace.nbytes,
            },
        )

    def ceilings(self, nbytes: int) -> Mapping[str, float]:
        self.runtime.check_open()
        return ceilings(self.runtime, nbytes)

    def close(self) -> None:
        self.runtime.close()
        for kv_pool in self._kv_pools:
            kv_pool.close()
        for adapter_pool in self._adapter_pools:
            adapter_pool.close()
        for handle in self._handles:
            handle.close()
        self.workspace.trim()
