"""FP8: what is kept of the files, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polysilicon.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from polysilicon.weights.encodings import GroupFloat

from .checkpoints import Case, Written
from .conftest import Refused
from .fp8_cases import CASES, config

Make = Callable[[Case], Written]
BY_NAME = {case.name: case for case in CASES}
BLOCKS, STATIC = BY_NAME["fp8-small-blocks"], BY_NAME["fp8-static"]
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT, SCALE = f"{NAME}.weight", f"{NAME}.weight_scale_inv"


def read(written: Written, **options: Any) -> GroupFloat:
    with open_checkpoint(written.folder, **options) as checkpoint:
        weight = checkpoint.weight(WEIGHT)
        assert isinstance(weight, GroupFloat)
        return weight


def test_codes_are_views_and_blocks_stay(made: Make) -> None:
    weight = read(made(BLOCKS))
    assert weight.block == (48, 32)
    assert not weight.codes.flags.writeable
    assert isinstance(weight.scale, np.ndarray)
    assert (weight.scale.shape, weight.scale.dtype) == ((3, 2), np.float32)
    assert weight.input_scale is None


def test_static_scales_of_activations(made: Make) -> None:
    written = made(STATIC)
    assert read(written).input_scale == float(written.stored[f"{NAME}.input_scale"])
    written.rewrite({f"{NAME}.input_scale": np.zeros(1, np.float32)})
    assert read(written).input_scale is None


def test_exponents_stay_narrow(made: Make) -> None:
    weight = read(made(BY_NAME["fp8-exponents"]))
    assert isinstance(weight.scale, np.ndarray)
    assert weight.scale.dtype == ml_dtypes.bfloat16


def test_the_format_may_be_named_where_the_config_says_nothing(made: Make) -> None:
    written = made(STATIC)
    written.rewrite({}, config={})
    with open_checkpoint(written.folder, quantization="fp8") as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert checkpoint.quantization == "fp8"
        np.testing.assert_array_equal(
            checkpoint.weight(WEIGHT).dequantize(), written.twin.tensors[WEIGHT]
        )


def changed(index: tuple[int, ...], value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(scale: np.ndarray) -> np.ndarray:
        scale = scale.copy()
        scale[index] = value
        return scale

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed((1, 1), np.nan), "not finite"),
        (changed((0, 0), np.inf), "not finite"),
        (changed((2, 1), 3e38), "so large"),
        (changed((2, 0), -1.0), "negative scales"),
        (lambda scale: scale[:2], r"shape \[2, 2\], which does not fit .*\[128, 64\]"),
        (lambda scale: scale.T, r"shape \[2, 3\]"),
        (lambda scale: scale[None], r"shape \[1, 3, 2\]"),
        (lambda scale: scale[:0], "has shape"),
        (lambda scale: scale.astype(np.int32), "is I32, expected F16 or BF16 or F32"),
        (lambda scale: None, "lacks tensor 'model.layers.0.self_attn.q_proj.weight_scale_inv'"),
    ],
)
def test_scales_that_cannot_be(
    made: Make, refused: Refused, change: Callable[[np.ndarray], np.ndarray | None], match: str
) -> None:
    written = made(BLOCKS)
    written.rewrite({SCALE: change(written.stored[SCALE])})
    refused(written.folder, match)


@pytest.mark.parametrize(
    ("tensor", "value", "match"),
    [
        (WEIGHT, np.zeros((128, 64), np.float16), "is F16, expected F8_E4M3 or F8_E5M2"),
        (WEIGHT, np.zeros(128 * 64, ml_dtypes.float8_e4m3fn), r"has shape \[8192\]"),
        (WEIGHT, None, "lacks tensor"),
        (f"{NAME}.weight_scale", np.ones(1, np.float32), "which means the same"),
        (f"{NAME}.input_scale", np.float32([np.nan]), "not finite"),
        (f"{NAME}.input_scale", np.float32([-1]), "negative"),
        (f"{NAME}.input_scale", np.float32([1, 2]), r"shape \[2\], expected 1 number"),
    ],
)
def test_parts_that_cannot_be(
    made: Make, refused: Refused, tensor: str, value: np.ndarray | None, match: str
) -> None:
    written = made(BLOCKS)
    written.rewrite({tensor: value})
    refused(written.folder, match)


def test_nan_among_exponents(made: Make, refused: Refused) -> None:
    written = made(BY_NAME["fp8-exponents"])
    scale = written.stored[SCALE].copy()
    scale.view(np.uint8)[0, 0] = 255
    written.rewrite({SCALE: scale})
    refused(written.folder, "scales that are NaN")


@pytest.mark.parametrize("size", [[48], [48, 0], "48x32", [48, -1], [1 << 40, 32], [48, 32, 1]])
def test_blocks_that_cannot_be(made: Make, refused: Refused, size: object) -> None:
    written = made(BLOCKS)
    written.rewrite({}, config=config(weight_block_size=size))
    refused(written.folder, "weight_block_size")


def test_blocks_that_are_not_those_of_the_scales(made: Make, refused: Refused) -> None:
    written = made(BLOCKS)
    written.rewrite({}, config=config(weight_block_size=[64, 64]))
    refused(written.folder, "does not fit")


def test_another_method(made: Make, refused: Refused) -> None:
    written = made(BLOCKS)
    refused(written.folder, "has 'fp8', which is not fbgemm_fp8", quantization="fbgemm_fp8")
    written.rewrite({}, config=config("fp9"))
    refused(written.folder, "quantised with 'fp9'")
    written.rewrite(
        {name: None for name in written.stored if "_proj" in name}, config=config("fp8")
    )
    refused(written.folder, "no tensor NAME.weight of FP8")
