"""The device: the native library's context, and everything that was placed on it."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Mapping, Sequence

from polysilicon.backend import (
    AdapterSpec,
    Capabilities,
    Device,
    DeviceError,
    Forward,
    KVSpec,
    MemoryInfo,
    PendingOutputs,
    SamplingBatch,
    Shard,
    Weight,
)
from polysilicon.device_checks import check_adapter_spec, check_kv_spec
from polysilicon.host_memory import check_fits, free_memory, total_memory
from polysilicon_cpu import ceilings, levels, library, placement
from polysilicon_cpu.calls import ArrayPool, InFlight
from polysilicon_cpu.handles import MatrixHandle, VectorHandle, place, placed_bytes
from polysilicon_cpu.options import Options
from polysilicon_cpu.pools import CPUAdapterPool, CPUKVPool
from polysilicon_cpu.program import CPUProgram, PendingStep
from polysilicon_cpu.recording import Recording
from polysilicon_cpu.sampling import CPUPendingTokens, sample
from polysilicon_cpu.trace import RecordingOps

_COMPUTE = {"auto": "int8", "int8": "int8", "bf16": "bf16", "f32": "f32"}
"""The precision that each rounding of inputs is declared as."""


class CPUDevice(Device):
    """Calls are queued to one native thread, which works on them with the others."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.level = levels.choose() if options.level is None else levels.check(options.level)
        places = placement.places()
        self.threads = options.threads or placement.default_threads(places)
        cpus = None
        if options.pin:
            cpus = (ctypes.c_int * self.threads)(
                *(places[thread % len(places)] for thread in range(self.threads))
            )
        error = library.ErrorText()
        pointer = library.load().ps_device_open(
            self.level.encode(), self.threads, cpus, options.deterministic, ctypes.byref(error),
            _interleaved(placement.nodes(places)),
        )  # fmt: skip
        if not pointer:
            library.raise_error(error)
        self._pointer: int | None = pointer
        self.capabilities = Capabilities(
            compute=_COMPUTE[options.activations],
            kv_dtypes=("bf16", "f16", "f32", "int8", "fp8_e4m3"),
            page_sizes=(16, 32, 64, 128, 1, 2, 4, 8),
            encodings=("*",),
            adapters=256,
            max_adapter_rank=256,
            deterministic=True,
            tree_attention=True,
            kv_scales=True,
            capture=True,
        )
        self.ops = RecordingOps(Recording())
        self.in_flight = InFlight()
        self.arrays = ArrayPool()
        self._handles: weakref.WeakSet[MatrixHandle | VectorHandle] = weakref.WeakSet()
        self._kv_pools: weakref.WeakSet[CPUKVPool] = weakref.WeakSet()
        self._adapter_pools: weakref.WeakSet[CPUAdapterPool] = weakref.WeakSet()
        self._programs: weakref.WeakSet[CPUProgram] = weakref.WeakSet()

    @property
    def exact_attention(self) -> bool:
        """Whether attention multiplies in float32 where pairs of bf16 would be faster."""
        return self.options.deterministic or self.options.activations == "f32"

    @property
    def pointer(self) -> int:
        return self.open_pointer()

    def open_pointer(self) -> int:
        """The native device. Raises DeviceError when it is closed."""
        if self._pointer is None:
            raise DeviceError("the device is closed")
        return self._pointer

    def put(
        self, parts: Sequence[Weight], shard: Shard | None = None
    ) -> MatrixHandle | VectorHandle:
        self.open_pointer()
        check_fits("weights", placed_bytes(parts, shard))
        handle = place(self, parts, shard, self.options.activations)
        self._handles.add(handle)
        return handle

    def kv_pool(self, spec: KVSpec, pages: int) -> CPUKVPool:
        self.open_pointer()
        check_kv_spec(spec, self.capabilities)
        check_fits("KV pages", spec.page_bytes * pages)
        pool = CPUKVPool(self, spec, pages)
        self._kv_pools.add(pool)
        return pool

    def adapter_pool(self, spec: AdapterSpec, slots: int) -> CPUAdapterPool:
        self.open_pointer()
        check_adapter_spec(spec, slots, self.capabilities)
        pool = CPUAdapterPool(self, spec, slots)
        self._adapter_pools.add(pool)
        return pool

    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> CPUProgram:
        self.open_pointer()
        program = CPUProgram(self, forward, hidden)
        self._programs.add(program)
        return program

    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> CPUPendingTokens:
        self.open_pointer()
        if not isinstance(pending, PendingStep) or pending.device is not self:
            raise ValueError("sample takes what a program of the same device returned")
        return sample(self, pending, batch)

    def memory(self) -> MemoryInfo:
        native, pointer = library.load(), self.open_pointer()
        workspace = native.ps_device_workspace(pointer) + self.arrays.nbytes
        return MemoryInfo(
            total=total_memory(),
            free=free_memory(),
            used={
                "weights": sum(handle.nbytes for handle in self._handles),
                "kv": sum(pool.nbytes for pool in self._kv_pools),
                "adapters": sum(pool.nbytes for pool in self._adapter_pools),
                "workspace": workspace + sum(program.nbytes for program in self._programs),
            },
        )

    def ceilings(self, nbytes: int) -> Mapping[str, float]:
        check_fits("a working set to measure", nbytes)
        return ceilings.ceilings(self.open_pointer(), nbytes)

    def finish(self) -> None:
        """Wait until everything submitted has ended."""
        self.in_flight.wait()

    def close(self) -> None:
        if self._pointer is None:
            return
        pointer, self._pointer = self._pointer, None
        if self.options.profile:
            for program in self._programs:
                print(program.profile(), file=sys.stderr, end="")
        library.load().ps_device_close(pointer)
        self.in_flight.clear()
        for kv_pool in self._kv_pools:
            kv_pool.forget()
        for adapter_pool in self._adapter_pools:
            adapter_pool.forget()
        for program in self._programs:
            program.finalizer()
        for handle in self._handles:
            if isinstance(handle, MatrixHandle):
                handle.finalizer()


def _interleaved(nodes: Sequence[int]) -> int:
    """The NUMA nodes among which memory is spread, as bits: none where there is one."""
    return sum(1 << node for node in nodes if node < 64) if len(nodes) > 1 else 0
