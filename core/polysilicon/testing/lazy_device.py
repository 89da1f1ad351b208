"""The lazy device: a queue of submitted calls before the reference device."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    AdapterPool,
    AdapterSpec,
    AdapterWeights,
    Batch,
    Device,
    DeviceError,
    Forward,
    Handle,
    KVPool,
    KVSpec,
    MemoryInfo,
    Outputs,
    Pending,
    PendingOutputs,
    PendingTokens,
    SampledTokens,
    SamplingBatch,
    Shard,
    Weight,
    sample_on_host,
)
from polysilicon.device_checks import check_indexes, check_kv_spec
from polysilicon.reference.device import ReferenceDevice
from polysilicon.reference.pools import ReferenceAdapterPool, ReferenceKVPool
from polysilicon.testing.lazy_batches import (
    Watched,
    check_batch,
    pad_batch,
    touched_pages,
    written_pages,
)
from polysilicon.testing.lazy_trace import ContractError, Tape

Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Result = TypeVar("Result")


class Call(Generic[Result]):
    """A submitted call. It runs when its result is asked for, or that of a later one."""

    def __init__(self, device: LazyDevice, run: Callable[[], Result]) -> None:
        self.device = device
        self._run: Callable[[], Result] | None = run
        self._value: Result | None = None
        self._error: Exception | None = None

    def result(self) -> Result:
        if self._run is not None:
            self.device.run_until(self)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def run(self) -> None:
        """Run it now. What it raises is kept for `result`; a broken contract concerns everyone."""
        run, self._run = self._run, None
        assert run is not None
        try:
            self._value = run()
        except ContractError as error:
            self._error = error
            raise
        except Exception as error:
            self._error = error


class Step(Call[Outputs]):
    """A submitted step; touched: by pool and page, the sequence slots that use it."""

    touched: dict[KVPool, dict[int, set[int]]]


class LazyDevice(Device):
    """See `polysilicon.testing.lazy`."""

    def __init__(self) -> None:
        self.inner = ReferenceDevice()
        self.ops = self.inner.ops
        self.capabilities = dataclasses.replace(
            self.inner.capabilities, page_sizes=(16, 5, 32, 1), capture=True
        )
        self.queue: deque[Call[Any]] = deque()
        self._last_sample: Call[SampledTokens] | None = None
        self._adapter_pools: list[LazyAdapterPool] = []

    def put(self, parts: Sequence[Weight], shard: Shard | None = None) -> Handle:
        return self.inner.put(parts, shard)

    def kv_pool(self, spec: KVSpec, pages: int) -> KVPool:
        check_kv_spec(spec, self.capabilities)
        return LazyKVPool(self, self.inner.kv_pool(spec, pages))

    def adapter_pool(self, spec: AdapterSpec, slots: int) -> AdapterPool:
        pool = LazyAdapterPool(self, self.inner.adapter_pool(spec, slots))
        self._adapter_pools.append(pool)
        return pool

    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> LazyProgram:
        self.inner.check_open()
        return LazyProgram(self, Tape(forward, hidden))

    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> PendingTokens:
        self.inner.check_open()
        if not isinstance(pending, Step) or pending.device is not self:
            raise ContractError("sample takes what a program of the same device returned")
        watched = Watched("sample", batch)

        def run() -> SampledTokens:
            watched.check()
            return sample_on_host(pending.result().logits, batch)

        self._last_sample = self.submit(Call(self, run))
        return self._last_sample

    def memory(self) -> MemoryInfo:
        memory = self.inner.memory()
        adapters = sum(pool.nbytes for pool in self._adapter_pools)
        return dataclasses.replace(memory, used={**memory.used, "adapters": adapters})

    def close(self) -> None:
        self.queue.clear()
        self.inner.close()

    Submitted = TypeVar("Submitted", bound=Call[Any])

    def submit(self, call: Submitted) -> Submitted:
        self.inner.check_open()
        self.queue.append(call)
        return call

    def run_until(self, call: Call[Any]) -> None:
        """Run what was submitted, in order, up to this call."""
        self.inner.check_open()
        while self.queue:
            first = self.queue.popleft()
            first.run()
            if first is call:
                return

    def run_all(self) -> None:
        if self.queue:
            self.run_until(self.queue[-1])

    def check_previous(self, previous: PendingTokens | None) -> Call[SampledTokens] | None:
        """Refuse tokens that are not those of the step before."""
        if previous is None:
            return None
        if previous is not self._last_sample:
            raise ContractError("`previous` is not what this device's last call of sample returned")
        return self._last_sample

    def check_fences(self, batch: Batch, pools: Sequence[KVPool]) -> None:
        """Refuse to store into a page that another sequence uses in a step that has not ended."""
        for pool in pools:
            written = written_pages(batch, pool)
            for step in self.queue:
                if not isinstance(step, Step) or pool not in step.touched:
                    continue
                for page, sequence in written:
                    users = step.touched[pool].get(page, {sequence})
                    if sequence not in users and page:
                        raise ContractError(
                            f"page {page} of KV group {pool.spec.name!r} was given to the sequence "
                            f"in slot {sequence} while a step in flight uses it for slot "
                            f"{min(users)}; a freed page waits for every earlier call"
                        )


class LazyProgram:
    """A taped forward."""

    def __init__(self, device: LazyDevice, tape: Tape) -> None:
        self._device = device
        self._tape = tape

    def __call__(self, batch: Batch, previous: PendingTokens | None) -> Step:
        device, pools = self._device, self._tape.pools
        device.inner.check_open()
        watched = Watched("a step", batch)
        check_batch(batch, pools)
        device.check_fences(batch, pools)
        before = device.check_previous(previous)
        taken = np.flatnonzero(batch.token_source >= 0)
        if len(taken) and before is None:
            raise ContractError("token_source names rows of a previous step, but there is none")
        rows, padded = batch.token_source[taken], pad_batch(batch)
        logit_rows, tokens = len(batch.logit_rows), len(batch.tokens)

        def run() -> Outputs:
            watched.check()
            if before is not None and len(taken):
                sampled = before.result().tokens
                check_indexes("token_source", rows, len(sampled))
                padded.tokens[taken] = sampled[rows]
            logits, hidden = self._tape.replay(device.ops, padded, _inner)
            return Outputs(
                logits=np.ascontiguousarray(logits[:logit_rows], np.float32),
                hidden={layer: values[:tokens] for layer, values in hidden.items()},
            )

        step = Step(device, run)
        step.touched = {pool: touched_pages(batch, pool) for pool in pools}
        return device.submit(step)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, (LazyKVPool, LazyAdapterPool)) else value


class LazyKVPool(KVPool):
    """Pages of the reference device, touched in the order of the queue."""

    def __init__(self, device: LazyDevice, inner: ReferenceKVPool) -> None:
        self.spec = inner.spec
        self.pages = inner.pages
        self.inner = inner
        self._device = device
        self._closed = False

    def copy(self, source: Int32, target: Int32) -> None:
        self._check_open()
        if source.dtype != np.int32 or target.dtype != np.int32 or source.shape != target.shape:
            raise ContractError("copy takes two int32 arrays of one length")
        check_indexes("slots", source, self.inner.slots)
        check_indexes("slots", target, self.inner.slots)
        if np.intersect1d(source, target).size or len(np.unique(target)) < len(target):
            raise ContractError("copy was given a slot twice")
        source, target = source.copy(), target.copy()
        self._device.submit(Call(self._device, lambda: self.inner.copy(source, target)))

    def read(self, pages: Sequence[int], into: Bytes) -> Pending:
        self._check_open()
        chosen = list(pages)
        return self._device.submit(
            Call(self._device, lambda: self.inner.read(chosen, into).result())
        )

    def write(self, pages: Sequence[int], data: Bytes) -> Pending:
        self._check_open()
        chosen, content = list(pages), data.tobytes()
        check_indexes("pages", np.array(chosen, np.int64), self.pages)
        scratch = ReferenceKVPool(self.spec, len(chosen))
        scratch.write(range(len(chosen)), data)  # refuses at once what is not of this spec

        def run() -> None:
            if data.tobytes() != content:
                raise ContractError("a write's data was changed before its result was there")
            self.inner.write(chosen, data).result()

        return self._device.submit(Call(self._device, run))

    def close(self) -> None:
        if not self._device.inner.closed:
            self._device.run_all()
        self._closed = True
        self.inner.close()

    def _check_open(self) -> None:
        self._device.inner.check_open()
        if self._closed:
            raise DeviceError(f"KV pool {self.spec.name!r} is closed")


class LazyAdapterPool(AdapterPool):
    """Adapters of the reference device, written in the order of the queue."""

    def __init__(self, device: LazyDevice, inner: ReferenceAdapterPool) -> None:
        self.spec = inner.spec
        self.slots = inner.slots
        self.inner = inner
        self._device = device
        # Takes every write at once, and so refuses at once what cannot be written.
        self._now = ReferenceAdapterPool(inner.spec, inner.slots)

    @property
    def nbytes(self) -> int:
        return self._now.nbytes

    def write(self, slot: int, weights: AdapterWeights) -> None:
        self._now.write(slot, weights)
        copied = {
            name: [None if part is None else (part[0].copy(), part[1].copy()) for part in parts]
            for name, parts in weights.items()
        }
        self._device.submit(Call(self._device, lambda: self.inner.write(slot, copied)))

    def clear(self, slot: int) -> None:
        self._now.clear(slot)
        self._device.submit(Call(self._device, lambda: self.inner.clear(slot)))

    def close(self) -> None:
        if not self._device.inner.closed:
            self._device.run_all()
        self._now.close()
        self.inner.close()
