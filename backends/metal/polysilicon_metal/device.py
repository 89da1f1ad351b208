"""The device: MLX's stream, and everything that was placed on it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from polysilicon.backend import (
    AdapterSpec,
    Capabilities,
    Device,
    DeviceError,
    Forward,
    KVSpec,
    MemoryInfo,
    OutOfMemory,
    PendingOutputs,
    SamplingBatch,
    Shard,
    Weight,
)
from polysilicon.device_checks import check_adapter_spec, check_kv_spec
from polysilicon_metal import hardware
from polysilicon_metal.adapters import MetalAdapterPool
from polysilicon_metal.ceilings import ceilings
from polysilicon_metal.handles import AnyHandle, place, placed_bytes
from polysilicon_metal.ops import MetalOps
from polysilicon_metal.options import Options
from polysilicon_metal.pools import MetalKVPool
from polysilicon_metal.products import Precision
from polysilicon_metal.program import MetalProgram, PendingStep
from polysilicon_metal.queue import Queue, Stage
from polysilicon_metal.sampling import MetalPendingTokens, Sampler
from polysilicon_metal.tracing import Trace

Function = Callable[..., Any]


class MetalDevice(Device):
    """Calls build MLX's graphs and submit them to a stream of the device's own, in order."""

    def __init__(self, options: Options) -> None:
        gpu = hardware.has_gpu()
        compiling = gpu if options.compile is None else options.compile
        automatic = options.activations == "auto"
        self.capabilities = Capabilities(
            compute=("bf16" if gpu else "f32") if automatic else options.activations,
            kv_dtypes=("bf16", "f16", "f32", "int8", "fp8_e4m3"),
            page_sizes=(16, 32, 64, 128, 1, 2, 4, 8),
            encodings=("dense:*", "affine:*", "float:f4_e2m1/*", "float:f8_e4m3/32"),
            adapters=256,
            max_adapter_rank=256,
            tree_attention=True,
            kv_scales=True,
            capture=compiling,
        )
        self.ops = MetalOps(Trace(blocks=(), token_slot=None, kv={}, adapters={}))
        self.queue = Queue()
        self._precision = Precision.of(options.activations)
        self._keep_dtype = gpu and automatic
        self.compiled: Callable[[Function], Function] = mx.compile if compiling else _as_it_is
        self._sampler = Sampler()
        self._stream = mx.new_thread_unsafe_stream(mx.gpu if gpu else mx.cpu)
        self._lock = threading.RLock()
        self._closed = False
        self._handles: weakref.WeakSet[AnyHandle] = weakref.WeakSet()
        self._kv_pools: weakref.WeakSet[MetalKVPool] = weakref.WeakSet()
        self._adapter_pools: weakref.WeakSet[MetalAdapterPool] = weakref.WeakSet()
        self._programs: weakref.WeakSet[MetalProgram] = weakref.WeakSet()
        hardware.bound_cache()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """MLX works on the device's stream, for one thread at a time."""
        with self._lock, mx.stream(self._stream):
            yield

    def check_open(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed")

    def wait(self, stage: Stage) -> None:
        """Until a call has ended. Raises what it raised."""
        with self.active():
            if not stage.ended:
                self.check_open()
            self.queue.wait(stage)

    def put(self, parts: Sequence[Weight], shard: Shard | None = None) -> AnyHandle:
        self.check_open()
        hardware.check_room("weights", placed_bytes(parts, shard))
        with self._allocating("weights"):
            handle = place(parts, shard, self._precision, keep_dtype=self._keep_dtype)
        self._handles.add(handle)
        return handle

    def kv_pool(self, spec: KVSpec, pages: int) -> MetalKVPool:
        self.check_open()
        check_kv_spec(spec, self.capabilities)
        hardware.check_room("KV pages", spec.page_bytes * pages)
        with self._allocating("KV pages"):
            pool = MetalKVPool(self, spec, pages)
        self._kv_pools.add(pool)
        hardware.wire(self._planned())
        return pool

    def adapter_pool(self, spec: AdapterSpec, slots: int) -> MetalAdapterPool:
        self.check_open()
        check_adapter_spec(spec, slots, self.capabilities)
        elements = sum(
            spec.max_rank * (target.inputs + outputs)
            for target in spec.targets.values()
            for outputs in target.outputs
        )
        hardware.check_room("adapters", 4 * slots * elements)
        with self._allocating("adapters"):
            pool = MetalAdapterPool(self, spec, slots)
        self._adapter_pools.add(pool)
        hardware.wire(self._planned())
        return pool

    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> MetalProgram:
        self.check_open()
        program = MetalProgram(self, forward, hidden)
        self._programs.add(program)
        return program

    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> MetalPendingTokens:
        self.check_open()
        if not isinstance(pending, PendingStep) or pending.device is not self:
            raise ValueError("sample takes what a program of the same device returned")
        with self.active():
            return self._sampler(self, pending, batch)

    def memory(self) -> MemoryInfo:
        self.check_open()
        used = {
            "weights": sum(handle.nbytes for handle in self._handles),
            "kv": sum(pool.nbytes for pool in self._kv_pools),
            "adapters": sum(pool.nbytes for pool in self._adapter_pools),
        }
        active = int(mx.get_active_memory()) + int(mx.get_cache_memory())
        used["workspace"] = max(0, active - sum(used.values()))
        return MemoryInfo(total=hardware.total(), free=hardware.free(), used=used)

    def ceilings(self, nbytes: int) -> Mapping[str, float]:
        self.check_open()
        hardware.check_room("a working set", nbytes)
        with self._allocating("a working set"):
            return ceilings(nbytes)

    def close(self) -> None:
        if self._closed:
            return
        with self.active():
            self.queue.drain()
            self._closed = True
            for kv_pool in self._kv_pools:
                kv_pool.forget()
            for adapter_pool in self._adapter_pools:
                adapter_pool.forget()
            for program in self._programs:
                program.release()
            for handle in self._handles:
                handle.release()
            self._sampler = Sampler()
            hardware.wire(0)
            mx.clear_cache()

    def _planned(self) -> int:
        return sum(
            item.nbytes
            for items in (self._handles, self._kv_pools, self._adapter_pools)
            for item in items
        )

    @contextlib.contextmanager
    def _allocating(self, what: str) -> Iterator[None]:
        with self.active():
            try:
                yield
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "alloc" not in str(error):
                    raise
                raise OutOfMemory(f"{what}: {error}") from error


def _as_it_is(function: Function) -> Function:
    return function
