"""HQQ: what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import GroupAffine

from .checkpoints import Case, Written
from .conftest import Refused
from .hqq_cases import CASES, number, text

Make = Callable[[Case], Written]
BY_NAME = {case.name: case for case in CASES}
PLAIN = BY_NAME["hqq-4-32-axis1"]
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{NAME}.weight"


def test_groups_that_cross_rows_become_smaller_ones(made: Make) -> None:
    """Rows of 96 in groups of 64."""
    with open_checkpoint(made(BY_NAME["hqq-8-64-axis1"]).folder) as checkpoint:
        down = checkpoint.weight("model.layers.0.mlp.down_proj.weight")
    assert isinstance(down, GroupAffine)
    assert (down.shape, down.group) == ((64, 96), 32)


def test_without_a_group_size_a_row_is_a_group(made: Make) -> None:
    written = made(PLAIN)
    rng = np.random.default_rng()
    codes = rng.integers(0, 16, (128, 64), np.uint8)
    scale, zero = (rng.uniform(1, 2, (128, 1)).astype(np.float16) for _ in range(2))
    written.rewrite(
        {
            f"{NAME}.W_q": codes[:64] << 4 | codes[64:],
            f"{NAME}.scale": scale,
            f"{NAME}.zero": zero,
            f"{NAME}.group_size": None,
        }
    )
    with open_checkpoint(written.folder) as checkpoint:
        weight = checkpoint.weight(WEIGHT)
    assert weight.encoding == "affine:4/64"
    expected = (codes - zero.astype(np.float64)) * scale.astype(np.float64)
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "array", "match"),
    [
        ("quant_scale", number(1, np.uint8), "says that scales are codes themselves"),
        ("quant_zero", number(1, np.uint8), "says that zero points are codes themselves"),
        ("channel_wise", number(0, np.uint8), "one scale for all"),
        ("shape", None, f"lacks tensor '{NAME}.shape'"),
        ("shape", np.array([128, 64, 1]), r"shape' has shape \[3\]"),
        ("shape", np.array([-128, -64]), "holds -128 and -64, which is no shape"),
        ("shape", np.array([1 << 62, 1 << 62]), "which is no shape"),
        ("shape", np.array([1 << 32, 1 << 32]), "which are no codes of"),
        ("shape", np.array([64, 64]), "which are no codes of"),
        ("shape", np.array([128.0, 64.0]), "shape' is F64"),
        ("axis", number(2), "is neither 0 nor 1"),
        ("axis", np.array(np.nan, np.float32), "is neither 0 nor 1"),
        ("group_size", number(0), "group_size' is 0, which does not divide"),
        ("group_size", number(-32), "group_size' is -32"),
        ("group_size", number(33), "group_size' is 33"),
        ("group_size", np.array(np.inf, np.float32), "group_size' is inf"),
        ("group_size", np.zeros(2, np.int32), r"group_size' has shape \[2\]"),
        ("group_size", number(8), "rows of 64, which cross groups of 8|no codes of"),
        ("group_size", number(64), "which are no codes of"),
        ("packing", None, f"lacks tensor '{NAME}.packing'"),
        ("packing", text("eval(1)"), r"packing' is 'eval\(1\)'; 8bit_u8"),
        ("packing", text("4bit_u8" * 9999), "packing' is '4bit_u84"),
        ("packing", text("2bit_u8"), "nbits' is 4, which is not packed as 2bit_u8"),
        ("nbits", number(3), "nbits' is 3, which is not packed as 4bit_u8"),
        ("nbits", number(-4), "nbits' is -4"),
        ("W_q", np.zeros((64, 32), np.uint8), r"has shape \[64, 32\], which are no codes"),
        ("W_q", np.zeros((128, 32), np.int32), "W_q' is I32, expected U8"),
        ("W_q", np.zeros((0, 32), np.uint8), r"has shape \[0, 32\]"),
        ("scale", np.zeros((255, 1), np.float16), r"scale' has shape \[255, 1\]"),
        ("scale", np.full((256, 1), np.nan, np.float16), "scale' holds numbers"),
        ("zero", np.full((256, 1), -np.inf, np.float16), "zero' holds numbers"),
        ("zero", np.zeros((256, 1), np.uint8), "zero' is U8"),
        ("zero", None, f"lacks tensor '{NAME}.zero'"),
        ("weight", np.zeros((128, 64), np.float32), "both plain and quantised"),
    ],
)
def test_damaged_tensors(made: Make, refused: Refused, part: str, array: Any, match: str) -> None:
    written = made(PLAIN)
    written.rewrite({f"{NAME}.{part}": array})
    refused(written.folder, match)


def test_codes_of_more_bits_than_are_said(made: Make, refused: Refused) -> None:
    written = made(BY_NAME["hqq-6-32-axis1"])
    written.rewrite({f"{NAME}.W_q": np.full((256, 32), 64, np.uint8)})
    refused(written.folder, "holds codes of more than 6 bits")


@pytest.mark.parametrize(
    ("case", "shape", "match"),
    [
        (PLAIN, (256, 1), "scales or biases that are not finite"),
        (BY_NAME["hqq-4-64-axis0"], (1, 128), "scale' is too large for its own dtype"),
    ],
)
def test_products_that_overflow(
    made: Make, refused: Refused, case: Case, shape: tuple[int, int], match: str
) -> None:
    written = made(case)
    written.rewrite(
        {
            f"{NAME}.scale": np.full(shape, 3e38, np.float32),
            f"{NAME}.zero": np.full(shape, 3.5, np.float32),
        }
    )
    refused(written.folder, match)


def test_what_is_no_hqq(made: Make, refused: Refused) -> None:
    written = made(PLAIN)
    refused(written.folder, "has 'hqq', which is not mlx", quantization="mlx")
    written.twin.write(written.folder)
    refused(written.folder, "has no tensor NAME.W_q", quantization="hqq")
