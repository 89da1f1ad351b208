"""Blocks of GGUF: against the gguf package, and as the inverse of the reader."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from polysilicon.quantization.gguf_encode import encode
from polysilicon.quantization.gguf_output import GGUF_FORMATS, fit_of
from polysilicon.weights.encodings import GroupAffine
from polysilicon.weights.gguf_blocks import TENSOR_TYPES, decode

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
KINDS = {kind.name: kind for kind in TENSOR_TYPES.values()}
# Where blocks hold f16 numbers, which must be finite.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("name", TYPES)
def test_encoding_undoes_decoding(name: str) -> None:
    random = np.random.default_rng(11)
    kind, rows, blocks = KINDS[name], 5, 3
    data = random.integers(0, 256, (rows, blocks, kind.size), np.uint8)
    for start in HALVES.get(name, (0,)):
        halves = random.standard_normal((rows, blocks)).astype(np.float16)
        data[..., start : start + 2] = halves[..., None].view(np.uint8)
    stored = data.reshape(rows, -1)
    weight = decode(stored.reshape(-1), kind, (rows, blocks * kind.elements))
    assert isinstance(weight, GroupAffine)
    np.testing.assert_array_equal(encode(weight, name), stored)


@pytest.mark.parametrize("name", TYPES)
def test_the_gguf_package_reads_what_was_meant(name: str) -> None:
    values = np.random.default_rng(4).standard_t(5, (6, 512)).astype(np.float32)
    values[1] = 0
    values[2] = np.abs(values[2])
    grid = fit_of(name)(values, None)
    weight = grid.weight(grid.nearest(values))
    read = quants.dequantize(encode(weight, name), gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(read, weight.dequantize())


# Grids with a bias have 0 among their values, which the package's need not have.
@pytest.mark.parametrize(
    ("name", "bound"), [("Q4_0", 1.0), ("Q4_1", 1.1), ("Q5_0", 1.0), ("Q5_1", 1.1), ("Q8_0", 1.0)]
)
def test_errors_are_no_larger_than_the_gguf_packages(name: str, bound: float) -> None:
    values = np.random.default_rng(6).standard_t(5, (32, 512)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    theirs = quants.dequantize(quants.quantize(values, kind), kind)
    grid = fit_of(name)(values, None)
    ours = grid.weight(grid.nearest(values)).dequantize()
    assert np.square(ours - values).sum() <= bound * np.square(theirs - values).sum()


def test_file_types_are_ggmls() -> None:
    for name, number in GGUF_FORMATS.items():
        upper = name.upper()
        mix = upper if upper.endswith("_M") or upper not in ("Q4_K", "Q5_K") else f"{upper}_S"
        assert gguf.LlamaFileType[f"MOSTLY_{mix}"] == number
