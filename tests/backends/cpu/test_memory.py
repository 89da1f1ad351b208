"""What the device takes beside weights and KV, and what it measures of the machine."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from polysilicon.backend import DeviceError, OutOfMemory
from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.engine.model_executor import ModelExecutor
from polysilicon.plan.bill import prompt_logits_bytes, workspace_bytes
from polysilicon.request import Request, SamplingParams
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
