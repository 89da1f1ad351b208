"""Whole engines on a device that runs out of memory, or is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from polysilicon.backend import (
    AdapterPool,
    AdapterSpec,
    Batch,
    Device,
    DeviceLost,
    Forward,
    Handle,
    KVPool,
    KVSpec,
    MemoryInfo,
    OutOfMemory,
    PendingOutputs,
    PendingTokens,
    Program,
    SampledTokens,
    SamplingBatch,
    Shard,
    Weight,
)
from polysilicon.errors import RequestError
from polysilicon.request import FinishReason, Request
from polysilicon.testing.engine_bench import EngineBench, greedy, mixed_requests
from polysilicon.testing.kit import Kit
from polysilicon.testing.tiny_models import tiny_gemma


class FailingDevice(Device):
    """The device under test, but for steps of which `before_step` raises something, and for results
    once `lost` says why there are none."""

    def __init__(self, inner: Device, before_step: Callable[[Batch], None]) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.ops = inner.ops
        self.before_step = before_step
        self.lost: str | None = None

    def put(self, parts: Sequence[Weight], shard: Shard | None = None) -> Handle:
        return self.inner.put(parts, shard)

    def kv_pool(self, spec: KVSpec, pages: int) -> KVPool:
        return self.inner.kv_pool(spec, pages)

    def adapter_pool(self, spec: AdapterSpec, slots: int) -> AdapterPool:
        return self.inner.adapter_pool(spec, slots)

    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> Program:
        return FailingProgram(self, self.inner.compile(forward, hidden=hidden))

    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> PendingTokens:
        return FailingTokens(self, self.inner.sample(pending, batch))

    def memory(self) -> MemoryInfo:
        return self.inner.memory()

    def close(self) -> None:
        self.inner.close()


class FailingProgram:
    def __init__(self, device: FailingDevice, inner: Program) -> None:
        self.device = device
        self.inner = inner

    def __call__(self, batch: Batch, previous: PendingTokens | None) -> PendingOutputs:
        self.device.before_step(batch)
        if previous is not None:
            assert isinstance(previous, FailingTokens)
            previous = previous.inner
        return self.inner(batch, previous)


class FailingTokens:
    def __init__(self, device: FailingDevice, inner: PendingTokens) -> None:
        self.device = device
        self.inner = inner

    def result(self) -> SampledTokens:
        if self.device.lost is not None:
            raise DeviceLost(self.device.lost)
        return self.inner.result()


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("most", [1, 4, 20])
def test_out_of_memory_in_large_steps(kit: Kit, tmp_path: Path, most: int, run_ahead: bool) -> None:
    """Steps of more than `most` tokens do not fit: smaller ones are tried, and give the same."""
    refused = []

    def before_step(batch: Batch) -> None:
        if len(batch.tokens) > most:
            refused.append(len(batch.tokens))
            raise OutOfMemory(f"{len(batch.tokens)} tokens do not fit")

    bench = EngineBench(FailingDevice(kit.device, before_step), tiny_gemma(), tmp_path)
    requests = mixed_requests(kit.rng)
    bench.serve(requests, run_ahead=run_ahead, step_tokens=256)
    assert refused
    bench.check_power()


def test_out_of_memory_in_the_smallest_step(kit: Kit, tmp_path: Path) -> None:
    """There is nothing smaller to try: every request ends with the cause."""

    def before_step(batch: Batch) -> None:
        raise OutOfMemory("there is no memory for anything")

    bench = EngineBench(FailingDevice(kit.device, before_step), tiny_gemma(), tmp_path)
    engine = bench.engine()
    requests = mixed_requests(kit.rng)
    for request in requests:
        engine.add(request)
    outputs = engine.step()
    assert sorted(output.request_id for output in outputs) == sorted(r.id for r in requests)
    for output in outputs:
        assert output.finish_reason is FinishReason.ERROR
        assert "no memory for anything" in (output.error or "")
    assert not engine.has_work
    bench.close(engine)


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("place", ["step", "result"])
def test_device_lost(kit: Kit, tmp_path: Path, place: str, run_ahead: bool) -> None:
    """Every request ends with the cause, tokens that had come stay right, and no more is taken."""
    steps = []

    def before_step(batch: Batch) -> None:
        steps.append(len(batch.tokens))
        if len(steps) == 4:
            if place == "step":
                raise DeviceLost("the power went out")
            device.lost = "the power went out"

    device = FailingDevice(kit.device, before_step)
    bench = EngineBench(device, tiny_gemma(), tmp_path)
    engine = bench.engine(run_ahead=run_ahead, step_tokens=100)
    requests = mixed_requests(kit.rng)
    for request in requests:
        engine.add(request)
    outputs = [output for _ in range(6) for output in engine.step()]
    assert not engine.has_work
    ended = [output for output in outputs if output.finish_reason is not None]
    assert sorted(output.request_id for output in ended) == sorted(r.id for r in requests)
    for output in ended:
        assert output.finish_reason is FinishReason.ERROR
        assert "the power went out" in (output.error or "")
    with pytest.raises(RequestError, match="the power went out"):
        engine.add(Request(id="late", prompt=(1, 2), params=greedy(2)))
    engine.cancel("mixed-0")
    assert engine.step() == []
    bench.close(engine)
