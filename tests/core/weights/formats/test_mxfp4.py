"""MXFP4: stacks as gpt-oss stores them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import GroupFloat

from .conftest import Refused
from .mxfp4_cases import config, stack

STACK = "model.layers.0.mlp.experts.gate_up_proj"
Change = Callable[[np.ndarray], np.ndarray | None]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Mapping[str, np.ndarray]], Path]:
    def written(tensors: Mapping[str, np.ndarray]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config()))
        contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        save_file(contiguous, tmp_path / "model.safetensors")
        return tmp_path

    return written


def parts() -> tuple[dict[str, np.ndarray], np.ndarray]:
    stored, values = stack(np.random.default_rng(2), 3, 10, 96)
    tensors = {f"{STACK}{end}": array for end, array in stored.items()}
    tensors[f"{STACK}_bias"] = np.ones((3, 10), np.float32)
    return tensors, values


def test_a_stack_has_outputs_before_inputs(
    write: Callable[[Mapping[str, np.ndarray]], Path],
) -> None:
    tensors, values = parts()
    with open_checkpoint(write(tensors)) as checkpoint:
        assert set(checkpoint.tensors) == {STACK, f"{STACK}_bias"}
        info = checkpoint.tensors[STACK]
        assert (info.shape, info.type) == ((3, 10, 96), "mxfp4:e2m1")
        assert info.nbytes == 3 * 10 * (48 + 3)
        weight = checkpoint.weight(STACK)
        assert isinstance(weight, GroupFloat)
        assert isinstance(weight.scale, np.ndarray)
        assert (weight.encoding, weight.scale.dtype) == ("float:f4_e2m1/32", ml_dtypes.bfloat16)
        np.testing.assert_array_equal(weight.dequantize(), values)
        # What a model does with outputs of gate and up that take turns.
        gate = weight.take_rows(np.arange(0, 10, 2))
        np.testing.assert_array_equal(gate.dequantize(), values[:, ::2])
        assert gate.encoding == weight.encoding


def test_the_least_and_the_largest_scales(
    write: Callable[[Mapping[str, np.ndarray]], Path],
) -> None:
    tensors, _ = parts()
    tensors[f"{STACK}_scales"] = np.full((3, 10, 3), 0, np.uint8)
    tensors[f"{STACK}_scales"][1] = 252
    tensors[f"{STACK}_blocks"] = np.full((3, 10, 3, 16), 0x72, np.uint8)
    with open_checkpoint(write(tensors)) as checkpoint:
        values = checkpoint.weight(STACK).dequantize().astype(np.float64)
    assert (values[0] == np.tile([1.0, 6.0], 48) * 2.0**-127).all()
    assert (values[1] == np.tile([1.0, 6.0], 48) * 2.0**125).all()


@pytest.mark.parametrize(
    ("end", "change", "match"),
    [
        ("_blocks", lambda a: a[..., :8], r"shape \[3, 10, 3, 8\], expected \[experts"),
        ("_blocks", lambda a: a[0, 0], r"shape \[3, 16\], expected \[experts"),
        ("_blocks", lambda a: a[None], r"shape \[1, 3, 10, 3, 16\]"),
        ("_blocks", lambda a: a.astype(np.int32), "is I32, expected U8"),
        ("_scales", lambda a: None, f"lacks tensor '{STACK}_scales'"),
        ("_scales", lambda a: a[:, :9], r"shape \[3, 9, 3\], expected \[3, 10, 3\]"),
        ("_scales", lambda a: a.astype(np.float32), "is F32, expected U8 or F8_E8M0"),
        ("_scales", lambda a: np.full_like(a, 255), "scales that are NaN"),
    ],
)
def test_parts_that_cannot_be(
    write: Callable[[Mapping[str, np.ndarray]], Path],
    refused: Refused,
    end: str,
    change: Change,
    match: str,
) -> None:
    tensors, _ = parts()
    value = change(tensors.pop(f"{STACK}{end}"))
    if value is not None:
        tensors[f"{STACK}{end}"] = value
    refused(write(tensors), match)


def test_stored_twice_or_not_at_all(
    write: Callable[[Mapping[str, np.ndarray]], Path], refused: Refused
) -> None:
    tensors, values = parts()
    refused(write({**tensors, STACK: values}), "both plain and quantised")
    refused(write({"x": values}), "no tensor NAME_blocks")
