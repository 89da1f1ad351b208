"""The torch device: everything that was placed on it, its stream of work and its memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from polysilicon.backend import (
    KV_DTYPES,
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
from polysilicon_torch.adapters import TorchAdapterPool
from polysilicon_torch.ceilings import ceilings
from polysilicon_torch.errors import contract_errors
from polysilicon_torch.handles import MatrixHandle, VectorHandle, handle_bytes, place
from polysilicon_torch.kernels import Kernels
from polysilicon_torch.ops import TorchOps
from polysilicon_torch.options import DTYPES, Options
from polysilicon_torch.pending import PendingStep, TorchPendingTokens
from polysilicon_torch.pools import STORAGES, TorchKVPool
from polysilicon_torch.program import TorchProgram
from polysilicon_torch.runtime import Runtime
from polysilicon_torch.sampling import upload_sampling

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TorchDevice(Device):
    """One rank. Calls are submitted to one stream, in order, and return."""

    def __init__(self, runtime: Runtime, kernels: Kernels, options: Options) -> None:
        self.runtime = runtime
        self.kernels = kernels
        self.options = options
        compute = _NAMES[kernels.dtype]
        stored = dict.fromkeys((compute, "bf16", "f16", "f32", *STORAGES))
        self.capabilities = Capabilities(
            # As coarse as int8 for the kit's bounds: e4m3 has three bits of mantissa.
            compute="int8" if options.fp8 else compute,
            kv_dtypes=tuple(name for name in stored if name in KV_DTYPES),
            page_sizes=(16, 32, 64, 128),
            encodings=("*",),
            adapters=256,
            max_adapter_rank=256,
            tree_attention=True,
            kv_scales=True,
            capture=runtime.graphs is not None and options.graphs,
        )
        self.ops = TorchOps(kernels, runtime.device)
        self._closed = False
        self._handles: weakref.WeakSet[MatrixHandle | VectorHandle] = weakref.WeakSet()
        self._kv_pools: weakref.WeakSet[TorchKVPool] = weakref.WeakSet()
        self._adapter_pools: weakref.WeakSet[TorchAdapterPool] = weakref.WeakSet()
        self._programs: weakref.WeakSet[TorchProgram] = weakref.WeakSet()

    def put(
        self, parts: Sequence[Weight], shard: Shard | None = None
    ) -> MatrixHandle | VectorHandle:
        self.check_open()
        self.runtime.check_fits("weights", handle_bytes(parts, shard, self.kernels))
        with contract_errors("weights"), self.runtime.active():
            handle = place(parts, shard, self.kernels, self.runtime.device)
        self._handles.add(handle)
        return handle

    def kv_pool(self, spec: KVSpec, pages: int) -> TorchKVPool:
        self.check_open()
        check_kv_spec(spec, self.capabilities)
        self.runtime.check_fits("KV pages", spec.page_bytes * pages)
        with self.runtime.active():
            pool = TorchKVPool(self, spec, pages)
        self._kv_pools.add(pool)
        return pool

    def adapter_pool(self, spec: AdapterSpec, slots: int) -> TorchAdapterPool:
        self.check_open()
        check_adapter_spec(spec, slots, self.capabilities)
        size = TorchAdapterPool.bytes_of(spec, slots, self.kernels.dtype)
        self.runtime.check_fits("adapter slots", size)
        with self.runtime.active():
            pool = TorchAdapterPool(self, spec, slots)
        self._adapter_pools.add(pool)
        return pool

    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> TorchProgram:
        self.check_open()
        program = TorchProgram(self, forward, hidden)
        self._programs.add(program)
        return program

    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> TorchPendingTokens:
        self.check_open()
        if not isinstance(pending, PendingStep) or pending.device is not self:
            raise ValueError("sample takes what a program of the same device returned")
        rows, vocabulary = pending.logits.shape
        if len(batch.draw) != rows:
            raise ValueError(
                f"a sampling batch of {len(batch.draw)} rows for {rows} rows of logits"
            )
        if not 0 <= batch.top_logprobs <= vocabulary:
            raise ValueError(
                f"top_logprobs is at most the vocabulary's {vocabulary}, got {batch.top_logprobs}"
            )
        with contract_errors("sampling"), self.runtime.active():
            placed = upload_sampling(self.runtime, batch)
            return TorchPendingTokens(self, self.kernels.sample(pending.logits, placed))

    def memory(self) -> MemoryInfo:
        self.check_open()
        total, free, held = self.runtime.memory()
        used = {
            "weights": sum(handle.nbytes for handle in self._handles),
            "kv": sum(pool.nbytes for pool in self._kv_pools),
            "adapters": sum(pool.nbytes for pool in self._adapter_pools),
            "graphs": 0 if self.runtime.graphs is None else self.runtime.graphs.nbytes,
        }
        # What torch's allocator holds beside: activations, and what it keeps for the next ones.
        used["workspace"] = max(0, held - sum(used.values()))
        return MemoryInfo(total=total, free=free, used=used)

    def tune(self, report: Callable[[str], None]) -> str | None:
        self.check_open()
        if self.kernels.tuning is None or self.runtime.device.type == "cpu":
            return None
        from polysilicon_torch.trials import trials
        from polysilicon_torch.tuner import tune

        card = torch.cuda.get_device_name(self.runtime.device)
        tuning = self.kernels.tuning
        with contract_errors("tuning"):
            found = trials(self.runtime, self.kernels.dtype, tuning.target)
            return tune(self.runtime, tuning, card, found, report)

    def ceilings(self, nbytes: int) -> Mapping[str, float]:
        self.check_open()
        self.runtime.check_fits("a working set", nbytes)
        tuning, device = self.kernels.tuning, self.runtime.device
        float8 = "none" if tuning is None or device.type == "cpu" else tuning.target.fp8
        with contract_errors("measuring"), self.runtime.active():
            return ceilings(self.runtime, nbytes, float8)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contract_errors("closing the device"):
            self.runtime.synchronize()
        for program in self._programs:
            program.forget()
        for kv_pool in self._kv_pools:
            kv_pool.close()
        for adapter_pool in self._adapter_pools:
            adapter_pool.close()
        for handle in self._handles:
            handle.release()

    def check_open(self) -> None:
        """Raise DeviceError when the device is closed."""
        if self._closed:
            raise DeviceError("the device is closed")
