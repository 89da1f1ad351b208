"""Every supported GGUF type against the `gguf` package's own dequantiser, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from polysilicon.weights.encodings import E8M0, Dense, GroupAffine, GroupFloat, SuperScaled
from polysilicon.weights.gguf import GGUFFile
from polysilicon.weights.gguf_blocks import (
    REMOVED_TYPES,
    SUPPORTED_TYPES,
    TENSOR_TYPES,
    TensorType,
    decode,
)

from .gguf_values import TYPES, dequantized

# Where each type keeps f16 numbers, which random bytes could make NaN or infinite.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "Q1_0": [0], "Q2_0": [0], "TQ1_0": [52], "TQ2_0": [64], "IQ4_NL": [0], "IQ4_XS": [0],
    "IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0],
    "IQ3_XXS": [0], "IQ3_S": [0], "MXFP4": [], "NVFP4": [],
}  # fmt: skip
# Bits an element of the types that grow: their codes name vectors or powers, not elements, or their
# scales are single bytes of floats.
GROWN = {
    "Q1_0": 2.125, "TQ1_0": 2.0625, "IQ1_S": 2.46875, "IQ1_M": 3.3125, "IQ2_XXS": 3.21875,
    "IQ2_XS": 3.375, "IQ2_S": 3.375, "IQ3_XXS": 4.21875, "IQ3_S": 4.21875, "MXFP4": 4.5,
    "NVFP4": 5.0,
}  # fmt: skip
DENSE_TYPES = ("F32", "F16", "BF16")


def assert_same_bits(values: np.ndarray, expected: np.ndarray) -> None:
    """All bits but the signs of zeros: the package takes fp4's -0 for 0."""
    assert values.dtype == expected.dtype == np.float32
    assert values.shape == expected.shape
    assert not np.isnan(expected).any()
    np.testing.assert_array_equal(values, expected)


def random_blocks(kind: TensorType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    blocks = (*shape[:-1], shape[-1] // kind.elements)
    raw = generator.integers(0, 256, (*blocks, kind.size), np.uint8)
    for start in HALVES[kind.name]:
        halves = generator.integers(0, 1 << 16, blocks, np.uint16)
        # An exponent of ones is infinity or NaN: clear one of its bits.
        halves[(halves & 0x7C00) == 0x7C00] &= 0xBFFF
        raw[..., start : start + 2] = halves[..., None].view(np.uint8)
    if kind.name == "IQ1_M":
        raw[..., 55] &= 0xBF  # the highest bit of the exponent
    if kind.name == "MXFP4":
        raw[..., 0] = generator.integers(0, 252, blocks)  # no overflow, no NaN
    return raw.reshape(*shape[:-1], -1)


def test_types_are_those_of_the_gguf_package() -> None:
    assert set(HALVES) | set(DENSE_TYPES) == set(SUPPORTED_TYPES)
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: kind.name for number, kind in TENSOR_TYPES.items()}.items() >= known.items()
    assert not REMOVED_TYPES.keys() & TENSOR_TYPES.keys()
    for number in known:
        kind = TENSOR_TYPES[number]
        # The package counts Q8_1 with two f32; ggml has two f16.
        if kind.name != "Q8_1":
            size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
            assert size == (kind.elements, kind.size), kind.name


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("rows", [(1,), (13,), (2, 3), ()])
@pytest.mark.parametrize("blocks", [1, 3])
def test_random_blocks_equal_the_reference(name: str, rows: tuple[int, ...], blocks: int) -> None:
    kind = TYPES[name]
    shape = (*rows, blocks * kind.elements)
    raw = random_blocks(kind, shape, seed=len(rows) * 10 + blocks)
    weight = decode(raw.reshape(-1), kind, shape)
    assert isinstance(weight, (GroupAffine, GroupFloat))
    assert weight.shape == shape
    assert_same_bits(weight.dequantize(), dequantized(raw, name))
    bits = GROWN.get(name, kind.size * 8 / kind.elements)
    assert weight.nbytes * 8 == bits * np.prod(shape)


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.filterwarnings("error")
def test_scales_that_are_no_numbers_are_decoded_without_a_warning(name: str) -> None:
    """Of every kind of NaN, quiet or signalling: who reads the file refuses them by name."""
    kind = TYPES[name]
    halves = np.arange(0, 1 << 16, 7, np.uint16)
    raw = np.zeros((len(halves), kind.size), np.uint8)
    for start in HALVES[name]:
        raw[:, start : start + 2] = halves[:, None].view(np.uint8)
    if name in ("IQ1_M", "MXFP4", "NVFP4"):
        raw[:] = halves[:, None].astype(np.uint8)
    assert decode(raw.reshape(-1), kind, (raw.size // kind.size * kind.elements,)).shape


@pytest.mark.parametrize("name", HALVES)
def test_a_tensor_of_several_chunks_equals_the_reference(name: str) -> None:
    kind = TYPES[name]
    shape = (521, 1024)
    raw = random_blocks(kind, shape, seed=3)
    values = decode(raw.reshape(-1), kind, shape).dequantize()
    assert_same_bits(values, dequantized(raw, name))


@pytest.mark.parametrize(
    ("name", "bits"),
    [("Q2_K", 4), ("Q3_K", 6), ("Q4_K", 6), ("Q5_K", 6), ("Q6_K", 8), ("IQ4_XS", 6), ("IQ2_S", 5),
     ("IQ3_XXS", 5), ("IQ1_M", 4)],
)  # fmt: skip
def test_scales_that_are_codes_stay_so(name: str, bits: int) -> None:
    kind = TYPES[name]
    weight = decode(random_blocks(kind, (2, 512), 0).reshape(-1), kind, (2, 512))
    assert isinstance(weight, (GroupAffine, GroupFloat))
    assert isinstance(weight.scale, SuperScaled)
    assert weight.scale.bits == bits
    assert weight.scale.scale.dtype == np.float16


@pytest.mark.parametrize("name", DENSE_TYPES)
def test_dense_types_are_views_and_equal_the_reference(name: str) -> None:
    values = np.random.default_rng(1).normal(size=(6, 10)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    raw = np.ascontiguousarray(raw)
    weight = decode(raw.reshape(-1), TYPES[name], (6, 10))
    assert isinstance(weight, Dense)
    assert np.shares_memory(weight.array, raw)
    assert_same_bits(
        weight.dequantize(), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    )


def every_point(name: str) -> np.ndarray:
    """A block for each point of a type's grid, all else zero but a scale of 1."""
    kind = TYPES[name]
    points = {"IQ1_S": 2048, "IQ1_M": 2048, "IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024,
              "IQ3_XXS": 256, "IQ3_S": 512}[name]  # fmt: skip
    raw = np.zeros((points, kind.size), np.uint8)
    index = np.arange(points)
    raw[:, 0 if name == "IQ1_M" else 2] = index & 255
    # Where the bits above the first eight of the block's first index stand.
    above = {"IQ1_S": 34, "IQ1_M": 32, "IQ2_XS": 3, "IQ2_S": 66, "IQ3_S": 66}.get(name)
    if above is not None:
        raw[:, above] = index >> 8
    if name == "IQ1_M":
        raw[:, 53], raw[:, 55] = 0xC0, 0x30  # the nibbles of 0x3C00
    else:
        raw[:, 1] = 0x3C
    return raw


@pytest.mark.parametrize(
    "name", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
)
def test_every_point_of_a_grid(name: str) -> None:
    raw = every_point(name)
    values = decode(raw.reshape(-1), TYPES[name], (len(raw), 256)).dequantize()
    assert_same_bits(values, dequantized(raw, name))
    assert len(np.unique(values, axis=0)) == len(raw)


def test_scales_of_mxfp4_are_powers_of_two() -> None:
    scales = E8M0.astype(np.float64)
    assert (scales[:255] == 2.0 ** (np.arange(255) - 127)).all()
    assert np.isnan(scales[255])


def sample(file: GGUFFile, per_type: int, most_bytes: int) -> Iterator[str]:
    """Names of tensors of every type in the file, no larger than `most_bytes`."""
    taken: dict[str, int] = {}
    for info in file.tensors.values():
        if info.nbytes <= most_bytes and taken.get(info.type, 0) < per_type:
            taken[info.type] = taken.get(info.type, 0) + 1
            yield info.name


def assert_tensors_equal_the_reference(path: Path, types: set[str]) -> None:
    """Hold a sample of a real file's tensors to the reference, before conventions are undone."""
    seen = set()
    with GGUFFile(path) as file:
        for name in sample(file, per_type=4, most_bytes=4 << 20):
            part, entry = file._entries[name]
            raw = part.data(entry.start, entry.info.nbytes)
            kind = gguf.GGMLQuantizationType[entry.info.type]
            expected = gguf.quants.dequantize(raw.reshape(*entry.info.shape[:-1], -1), kind)
            assert_same_bits(decode(raw, entry.kind, entry.info.shape).dequantize(), expected)
            seen.add(entry.info.type)
    assert seen >= types


def test_real_q4_1_file(smollm2_path: Path) -> None:
    assert_tensors_equal_the_reference(smollm2_path, {"F32", "Q4_1"})


def test_real_k_quant_file(gemma3_path: Path) -> None:
    assert_tensors_equal_the_reference(gemma3_path, {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"})


@pytest.mark.parametrize("rows", [slice(0, 300), slice(-300, None)])
def test_real_q8_0_embedding(smollm2_path: Path, rows: slice) -> None:
    with GGUFFile(smollm2_path) as file:
        weight = file.weight("token_embd.weight")
        part, entry = file._entries["token_embd.weight"]
        raw = part.data(entry.start, entry.info.nbytes).reshape(weight.shape[0], -1)[rows]
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
        taken = weight.take_rows(np.arange(weight.shape[0])[rows])
    assert_same_bits(taken.dequantize(), expected)
