"""A small model in every format, on every backend that runs here, against its dense twin."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from polysilicon.backend import Device
from polysilicon.models.transcoding import transcode
from polysilicon.testing.engine_bench import COMPUTE_BOUNDS, random_prompt
from polysilicon.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from polysilicon.weights.formats.registry import FORMATS

from . import (
    awq_cases,
    bitsandbytes_cases,
    compressed_tensors_cases,
    fp8_cases,
    gptq_cases,
    hqq_cases,
    mlx_cases,
    modelopt_cases,
    mxfp4_cases,
    torchao_cases,
)
from .checkpoints import Case, Written, write
from .devices import BACKENDS, OpenDevice, logits

CASES = [
    *gptq_cases.CASES,
    *awq_cases.CASES,
    *mlx_cases.CASES,
    *bitsandbytes_cases.CASES,
    *hqq_cases.CASES,
    *compressed_tensors_cases.CASES,
    *fp8_cases.CASES,
    *modelopt_cases.CASES,
    *mxfp4_cases.CASES,
    *torchao_cases.CASES,
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Written]:
    folder = tmp_path_factory.mktemp("checkpoints")
    rng = np.random.default_rng()
    return functools.cache(lambda case: write(folder / case.name, case, rng))


def is_rounded(made: Written, device: Device) -> bool:
    """Whether a device holds quantised weights in 16 bits, as it does not run their encoding."""
    with open_checkpoint(made.folder) as checkpoint:
        held = (
            transcode(checkpoint.weight(name), device.capabilities).encoding
            for name in made.quantized
        )
        return not {"dense:f16", "dense:bf16"}.isdisjoint(held)


def test_every_type_that_is_declared_is_tried() -> None:
    """What the matrix of formats shows is what is shown here."""
    declared = {type for format in FORMATS if format.name != "dense" for type in format.encodings}
    assert {case.type for case in CASES} == declared


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_are_those_of_the_dense_model(
    written: Callable[[Case], Written], case: Case
) -> None:
    """Names, shapes, types, encodings, sizes, and every value."""
    made = written(case)
    declared = dict(itertools.chain(*(format.encodings.items() for format in FORMATS)))
    with open_checkpoint(made.folder) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert case.type in {checkpoint.tensors[name].type for name in made.quantized}
        assert checkpoint.tensors.keys() == made.twin.tensors.keys()
        for name, values in made.twin.tensors.items():
            info, weight = checkpoint.tensors[name], checkpoint.weight(name)
            assert info.name == name
            assert info.shape == weight.shape == values.shape
            family = declared[info.type].rpartition("/")[0]
            assert weight.encoding.rpartition("/")[0] == family
            if name not in made.quantized:
                assert weight.encoding.startswith("dense:")
            got = weight.dequantize()
            assert got.dtype == np.float32
            bound = case.ulps * np.spacing(np.abs(values).max())
            np.testing.assert_allclose(got, values, rtol=0, atol=bound, err_msg=name)
        total = sum(info.nbytes for info in checkpoint.tensors.values())
        assert total == sum(array.nbytes for array in made.stored.values())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_answers_as_its_dense_twin(
    written: Callable[[Case], Written], device: OpenDevice, case: Case, backend: str
) -> None:
    opened = device(backend)
    made = written(case)
    tokens = random_prompt(np.random.default_rng(3), 24)
    got = logits(made.folder, opened, tokens)
    twin = made.folder / "twin"
    made.twin.write(twin)
    expected = logits(twin, device("reference"), tokens)
    assert np.ptp(expected) > 1
    bound = COMPUTE_BOUNDS[opened.capabilities.compute]
    if is_rounded(made, opened):
        bound = max(bound, COMPUTE_BOUNDS["f16"])
    if backend == "reference" and case.ulps == 0:
        bound = 0.0
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
