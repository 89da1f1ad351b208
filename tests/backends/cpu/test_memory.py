"""What the device takes beside weights and KV, and what it measures of the machine."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import Batch, Dense, DeviceError, KVSpec, Ops, OutOfMemory, kv_planes
from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.engine.model_executor import ModelExecutor
from polysilicon.plan.bill import prompt_logits_bytes, workspace_bytes
from polysilicon.request import Request, SamplingParams
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import as_forward
from polysilicon_cpu.device import CPUDevice


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_steps_take_no_more_than_is_planned(
    prompt_logprobs: int | None, smollm2_path: Path
) -> None:
    config = Config(backend="cpu", step_tokens=96, max_sequences=6, kv_memory=64 << 20)
    loaded = load(config, smollm2_path)
    executor = loaded.engine.executor
    assert isinstance(executor, ModelExecutor)
    rng = np.random.default_rng()
    requests = [
        Request(
            id=str(index),
            prompt=tuple(map(int, rng.integers(10, 40000, 40 + index))),
            params=SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=prompt_logprobs),
        )
        for index in range(9)
    ]
    outputs = list(loaded.client.generate(requests))
    assert sum(output.finish_reason is not None for output in outputs) == 9
    planned = workspace_bytes(executor.model.config, step_tokens=96, max_sequences=6)
    if prompt_logprobs:
        planned += prompt_logits_bytes(executor.model.config, step_tokens=96)
    taken = executor.device.memory().used
    assert 0 < taken["workspace"] <= planned
    assert taken["weights"] == executor.model.nbytes
    assert taken["kv"] <= 64 << 20
    loaded.client.close()
    loaded.checkpoint.close()


def test_what_the_machine_does_at_most(device: CPUDevice) -> None:
    found = device.ceilings(1 << 20)
    assert {"bandwidth"} <= set(found) <= {"bandwidth", "f32", "bf16", "int8"}
    assert all(math.isfinite(rate) and rate > 1e6 for rate in found.values())


def test_no_working_set_beyond_memory(device: CPUDevice) -> None:
    with pytest.raises(OutOfMemory, match="working set"):
        device.ceilings(1 << 50)
    device.close()
    with pytest.raises(DeviceError):
        device.ceilings(1 << 20)


PAGES, PAGE_SIZE = 512, 64
LAYERS = 4
TOKEN_BYTES = 1024
"""Of one layer of the pool below: a slab is 32 MiB."""
POPULATE_WRITE = 23


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def provides_memory() -> bool:
    """Whether this system takes the request for memory: Linux from 5.14 on does."""
    if not Path("/proc/self/statm").exists():
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        libc = ctypes.CDLL(None, use_errno=True)
        place = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return bool(libc.madvise(ctypes.c_void_p(place), mmap.PAGESIZE, POPULATE_WRITE) == 0)


def wait_for(least: int, before: int) -> int:
    """How much memory was taken since, once it is as much as that."""
    end = time.monotonic() + 60
    while resident_bytes() - before < least and time.monotonic() < end:
        time.sleep(0.02)
    return resident_bytes() - before


@pytest.mark.skipif(not provides_memory(), reason="needs MADV_POPULATE_WRITE (Linux 5.14)")
def test_kv_memory_is_provided_ahead_of_use(device: CPUDevice) -> None:
    """The next 2 MiB of every layer, in moments without work; what is stored stays as it is."""
    planes = kv_planes(heads=2, key_dim=64, value_dim=64, dtype="f32")
    spec = KVSpec(group=0, name="full", layers=tuple(range(LAYERS)), window=None, planes=planes,
                  page_size=PAGE_SIZE)  # fmt: skip
    values = np.random.default_rng().standard_normal((5, 128)).astype(np.float32)
    table = device.put([Dense(array=values)])
    ahead = LAYERS * (2 << 20)
    before = resident_bytes()
    pool = device.kv_pool(spec, PAGES)
    assert ahead * 0.9 < wait_for(ahead, before) < 4 * ahead

    def computation(ops: Ops, batch: Batch) -> Any:
        x = ops.embed(table, batch.tokens)
        for layer in spec.layers:
            ops.attention(x, x, x, batch=batch, pool=pool, layer=layer, heads=2, scale=1.0)
        return x

    program = device.compile(as_forward(computation))
    page = PAGES // 4
    batch = make_batch([Chunk(tokens=[3, 1, 4], pages=[[page]])], [PAGE_SIZE])
    program(batch, None).result()
    used = LAYERS * TOKEN_BYTES * PAGE_SIZE * (page + 1)
    assert (used + ahead) * 0.9 < wait_for(used + ahead, before) < LAYERS * (20 << 20)
    back = np.zeros((1, PAGE_SIZE // 16, spec.block_bytes), np.uint8)
    pool.read([page], back).result()
    header = len(spec.block_header())
    stored = back[0, 0, header:].view(np.float32).reshape(LAYERS, 2, 2, 16, 64)
    expected = values[[3, 1, 4]].reshape(3, 2, 64).swapaxes(0, 1)
    assert (stored[:, :, :, :3] == expected).all()
    program(make_batch([Chunk(tokens=[0], pages=[[PAGES - 1]])], [PAGE_SIZE]), None).result()
    pool.close()
