"""Every supported GGUF type against the `gguf` package's own dequantiser, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from polysilicon.weights.encodings import Dense, GroupAffine, SuperScaled
from polysilicon.weights.gguf import GGUFFile
from polysilicon.weights.gguf_blocks import (
    REMOVED_TYPES,
    SUPPORTED_TYPES,
    TENSOR_TYPES,
    TensorType,
    decode,
)

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
# Where each type keeps f16 numbers, which random bytes could make NaN or infinite.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
DENSE_TYPES = ("F32", "F16", "BF16")


def assert_same_bits(values: np.ndarray, expected: np.ndarray) -> None:
    assert values.dtype == expected.dtype == np.float32
    assert values.shape == expected.shape
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def random_blocks(kind: TensorType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    blocks = (*shape[:-1], shape[-1] // kind.elements)
    raw = generator.integers(0, 256, (*blocks, kind.size), np.uint8)
    for start in HALVES[kind.name]:
        halves = generator.integers(0, 1 << 16, blocks, np.uint16)
        # An exponent of ones is infinity or NaN: clear one of its bits.
        halves[(halves & 0x7C00) == 0x7C00] &= 0xBFFF
        raw[..., start : start + 2] = halves[..., None].view(np.uint8)
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
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert isinstance(weight, GroupAffine)
    assert weight.shape == shape
    assert_same_bits(weight.dequantize(), expected)
    assert weight.nbytes == raw.nbytes


@pytest.mark.parametrize("name", HALVES)
def test_a_tensor_of_several_chunks_equals_the_reference(name: str) -> None:
    kind = TYPES[name]
    shape = (521, 1024)
    raw = random_blocks(kind, shape, seed=3)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert_same_bits(decode(raw.reshape(-1), kind, shape).dequantize(), expected)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_keep_their_scales_as_codes(name: str) -> None:
    kind = TYPES[name]
    weight = decode(random_blocks(kind, (2, 512), 0).reshape(-1), kind, (2, 512))
    assert isinstance(weight, GroupAffine)
    assert isinstance(weight.scale, SuperScaled)
    bits = {"Q2_K": 4, "Q3_K": 6, "Q4_K": 6, "Q5_K": 6, "Q6_K": 8}[name]
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
