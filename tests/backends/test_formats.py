"""Every checkpoint format that is read, on every backend: a small model in each of them answers on
a device as it does on the reference device.

A backend that cannot run here is skipped with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import Capabilities, Device
from polysilicon.format_matrix import Support, formats
from polysilicon.models.transcoding import transcode
from polysilicon.reference.device import ReferenceDevice
from polysilicon.testing.engine_bench import COMPUTE_BOUNDS, STORE_BOUNDS
from polysilicon.weights.checkpoint import open_checkpoint

from ..core.weights.formats import checkpoints, gguf_models
from ..core.weights.formats.answers import logits
from ..core.weights.formats.cases import CASES
from .devices import Opening, opened_devices

DEVICES = {
    "cpu": Opening(module="polysilicon_cpu.plugin"),
    "cpu-f32": Opening(module="polysilicon_cpu.plugin", options={"activations": "f32"}),
    "metal": Opening(module="polysilicon_metal.plugin"),
    "opencl": Opening(module="polysilicon_opencl.plugin"),
    "opencl-gpu": Opening(module="polysilicon_opencl.plugin", options={"shapes": "gpu"}),
    "cuda": Opening(module="polysilicon_cuda.plugin"),
    "cuda-host": Opening(module="polysilicon_cuda.host", options={"activations": "f32"}),
    "rocm": Opening(module="polysilicon_rocm.plugin"),
    "rocm-host": Opening(module="polysilicon_rocm.host", options={"activations": "f32"}),
}
"""Each as it is by default, and in float32 where that is not the same: its bound is the narrowest.
The torch devices in the host's memory stand in for those of GPUs, and OpenCL's kernels for GPUs run
on any device."""

PART = 0.25
"""Of the bounds, which are for the largest of few differences of logits, what the root mean square
of all of them may be. It is at most 0.15 where kernels are right; logits that have nothing to do
with each other differ by more than the whole of the widest bound."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A small model in a row of the matrix. write: into a folder; gives back what to open."""

    container: str
    type: str
    name: str
    write: Callable[[Path], Path]

    def __str__(self) -> str:
        return self.name


def samples() -> Iterator[Sample]:
    # Seeded: the bounds are no certainties.
    for case in CASES:
        yield Sample(
            container="safetensors",
            type=case.type,
            name=case.name,
            write=lambda folder, case=case: (
                checkpoints.write(folder, case, np.random.default_rng(7)).folder
            ),
        )
    for kind in gguf_models.KINDS:
        yield Sample(
            container="gguf",
            type=kind,
            name=f"gguf-{kind}",
            write=lambda folder, kind=kind: gguf_models.write(
                folder, kind, np.random.default_rng(7)
            ),
        )


SAMPLES = list(samples())


@pytest.fixture(scope="module")
def device() -> Iterator[Callable[[str], Device]]:
    with opened_devices(DEVICES) as open_device:
        yield open_device


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sample], Path]:
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda sample: sample.write(folder / sample.name))


@pytest.fixture(scope="module")
def expected(
    written: Callable[[Sample], Path],
) -> Iterator[Callable[[Sample, str], npt.NDArray[np.float32]]]:
    """Logits of a sample on the reference device, with KV of a dtype."""
    reference = ReferenceDevice()
    yield functools.cache(lambda sample, kv_dtype: logits(written(sample), reference, kv_dtype))
    reference.close()


def rounds_weights(path: Path, capabilities: Capabilities) -> bool:
    """Whether a device holds weights of the file in 16 bits, as it does not take their encoding."""
    with open_checkpoint(path) as checkpoint:
        weights = (checkpoint.weight(name) for name in checkpoint.tensors)
        held = [
            transcode(weight, capabilities).encoding
            for weight in weights
            if not capabilities.takes(weight.encoding)
        ]
    return not {"dense:f16", "dense:bf16"}.isdisjoint(held)


def test_every_row_of_the_matrix_is_tried() -> None:
    read = {(row.container, row.type) for row in formats() if row.encoding}
    assert {(sample.container, sample.type) for sample in SAMPLES} == read


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_a_sample_is_of_its_row(written: Callable[[Sample], Path], sample: Sample) -> None:
    (row,) = (
        row for row in formats() if (row.container, row.type) == (sample.container, sample.type)
    )
    with open_checkpoint(written(sample)) as checkpoint:
        weights = [
            checkpoint.weight(name)
            for name, info in checkpoint.tensors.items()
            if info.type == sample.type and len(info.shape) == 2
        ]
    assert weights
    # Groups of other sizes than the usual are of the row as well, and values that are computed from
    # what is stored are in either of the 16-bit dtypes.
    family = row.encoding.partition("/")[0]
    families = {"dense:f16", "dense:bf16"} if sample.type == "hqq:axis0" else {family}
    assert families.issuperset(weight.encoding.partition("/")[0] for weight in weights)


@pytest.mark.parametrize("name", DEVICES)
def test_no_row_is_refused_without_a_reason(device: Callable[[str], Device], name: str) -> None:
    capabilities = device(name).capabilities
    for row in formats():
        assert (row.support(capabilities) is Support.REFUSED) == bool(row.reason), row


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
@pytest.mark.parametrize("name", DEVICES)
def test_a_model_answers_as_on_the_reference_device(
    device: Callable[[str], Device],
    written: Callable[[Sample], Path],
    expected: Callable[[Sample, str], npt.NDArray[np.float32]],
    name: str,
    sample: Sample,
) -> None:
    opened = device(name)
    declared = opened.capabilities
    kv_dtype = "f32" if "f32" in declared.kv_dtypes else declared.kv_dtypes[0]
    bound = COMPUTE_BOUNDS[declared.compute]
    if rounds_weights(written(sample), declared):
        bound = max(bound, COMPUTE_BOUNDS["f16"])
    got = logits(written(sample), opened, kv_dtype)
    wanted = expected(sample, kv_dtype)
    assert got.shape == wanted.shape
    assert wanted.std() > 2
    assert np.isfinite(got).all()
    difference = float(np.sqrt(np.mean((got - wanted) ** 2)))
    assert difference <= PART * (bound + STORE_BOUNDS[kv_dtype])
