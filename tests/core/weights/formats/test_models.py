"""A small model in every format of safetensors: tensors and answers are those of its dense twin."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from polysilicon.backend import Device
from polysilicon.testing.engine_bench import COMPUTE_BOUNDS
from polysilicon.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from polysilicon.weights.formats.registry import FORMATS

from .answers import logits
from .cases import CASES
from .checkpoints import Case, Written, write


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Written]:
    folder = tmp_path_factory.mktemp("checkpoints")
    rng = np.random.default_rng()
    return functools.cache(lambda case: write(folder / case.name, case, rng))


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
def test_the_model_answers_as_its_dense_twin(
    written: Callable[[Case], Written], reference: Device, case: Case
) -> None:
    made = written(case)
    twin = made.folder / "twin"
    made.twin.write(twin)
    expected = logits(twin, reference)
    assert np.ptp(expected) > 1
    bound = COMPUTE_BOUNDS["f32"] if case.ulps else 0.0
    np.testing.assert_allclose(logits(made.folder, reference), expected, rtol=0, atol=bound)
