"""The backends on which small models are tried, each opened once, and the logits that they give."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import Device, Unavailable
from polysilicon.models.loading import load_model
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.weights.checkpoint import open_checkpoint

BACKENDS: dict[str, tuple[str, dict[str, str]]] = {
    "reference": ("polysilicon.reference.plugin", {}),
    "cpu": ("polysilicon_cpu.plugin", {"activations": "f32"}),
    "metal": ("polysilicon_metal.plugin", {"activations": "f32"}),
    "opencl": ("polysilicon_opencl.plugin", {}),
    "cuda-host": ("polysilicon_cuda.host", {"activations": "f32", "kernels": "torch"}),
}
"""By name: the module that supplies the backend, and options."""

PAGE_SIZE = 128
OpenDevice = Callable[[str], Device]


@contextlib.contextmanager
def opened_devices() -> Iterator[OpenDevice]:
    """Opens backends, each once; skips a test where one cannot run."""
    opened: list[Device] = []

    @functools.cache
    def find(name: str) -> Device | str:
        module, options = BACKENDS[name]
        try:
            (backend,) = importlib.import_module(module).polysilicon_backends()
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        found = backend.probe()
        if isinstance(found, Unavailable):
            return found.reason
        opened.append(backend.open(0, options))
        return opened[-1]

    def open_device(name: str) -> Device:
        found = find(name)
        if isinstance(found, str):
            pytest.skip(f"{name}: {found}")
        return found

    yield open_device
    for device in opened:
        device.close()


def logits(path: Path, device: Device, tokens: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Logits `[T, V]` of a prompt in one go, with float32 KV where the device has it."""
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, device, max_length=len(tokens))
    dtypes = device.capabilities.kv_dtypes
    specs = model.kv_specs(PAGE_SIZE, "f32" if "f32" in dtypes else dtypes[0])
    pools = [device.kv_pool(spec, 2) for spec in specs]
    model.bind(pools, None)
    program = device.compile(model.forward)
    batch = make_batch([Chunk(tokens=tokens, pages=[[1]] * len(pools))], [PAGE_SIZE] * len(pools))
    result = program(batch, None).result().logits
    for pool in pools:
        pool.close()
    return result
