"""What a small model in a file answers on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from polysilicon.backend import Device
from polysilicon.models.loading import load_model
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.engine_bench import random_prompt
from polysilicon.weights.checkpoint import open_checkpoint

TOKENS = random_prompt(np.random.default_rng(3), 24)
PAGE_SIZE = 128


def logits(path: Path, device: Device, kv_dtype: str = "f32") -> npt.NDArray[np.float32]:
    """Logits `[T, V]` of `TOKENS`, the last one decoded behind the others."""
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, device, max_length=len(TOKENS))
    pools = [device.kv_pool(spec, 2) for spec in model.kv_specs(PAGE_SIZE, kv_dtype)]
    model.bind(pools, None)
    program = device.compile(model.forward)
    rows = []
    for start, end in (0, len(TOKENS) - 1), (len(TOKENS) - 1, len(TOKENS)):
        chunk = Chunk(tokens=TOKENS[start:end], start=start, pages=[[1]] * len(pools))
        batch = make_batch([chunk], [PAGE_SIZE] * len(pools))
        rows.append(program(batch, None).result().logits)
    for pool in pools:
        pool.close()
    return np.concatenate(rows)
