"""torchao: what is refused, by name where it is a layout that is not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import GroupAffine, GroupFloat

from .checkpoints import Case, Written
from .conftest import Refused
from .torchao_cases import CASES, described

Make = Callable[[Case], Written]
BY_NAME = {case.name: case for case in CASES}
INTX = BY_NAME["torchao-intx4-zeros"]
INT8 = BY_NAME["torchao-int8-rows"]
INT4 = BY_NAME["torchao-int4"]
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT, PREFIX = f"{NAME}.weight", f"{NAME}._weight_"
PARTS = ("qdata", "scale", "zero_point")
TARGET = {"_type": "torch.dtype", "_data": "int4"}


def test_scales_of_blocks_keep_their_form(made: Make) -> None:
    for name, encoding in {
        "torchao-int8-whole": "affine:8/64",
        "torchao-float8-rows": "float:f8_e4m3/64",
        "torchao-float8-blocks": "float:f8_e4m3/32x32",
    }.items():
        with open_checkpoint(made(BY_NAME[name]).folder) as checkpoint:
            assert checkpoint.weight(WEIGHT).encoding == encoding


def test_symmetric_codes_have_an_offset_and_no_bias(made: Make) -> None:
    for name in ("torchao-int8-rows", "torchao-int4-symmetric"):
        with open_checkpoint(made(BY_NAME[name]).folder) as checkpoint:
            weight = checkpoint.weight(WEIGHT)
        assert isinstance(weight, GroupAffine)
        assert (weight.offset, weight.bias) == (1 << (weight.bits - 1), None)


def test_a_stack_of_experts(made: Make) -> None:
    written = made(INT8)
    rng = np.random.default_rng()
    codes = rng.integers(-128, 128, (3, 32, 64), np.int8)
    scale = rng.uniform(0.5, 1, (3, 32, 1)).astype(np.float16)
    stored = {"experts._up_qdata": codes, "experts._up_scale": scale}
    entry = described("Int8Tensor", (1, 1, 64), ("qdata", "scale"))
    written.rewrite(stored, metadata={**written.metadata, "experts.up": entry})
    with open_checkpoint(written.folder) as checkpoint:
        stack = checkpoint.weight("experts.up")
    assert stack.shape == (3, 32, 64)
    expected = codes.astype(np.float32) * scale.astype(np.float32)
    np.testing.assert_array_equal(stack.dequantize(), expected)


def test_one_scale_for_a_float8_matrix(made: Make) -> None:
    with open_checkpoint(made(BY_NAME["torchao-float8-whole"]).folder) as checkpoint:
        weight = checkpoint.weight(WEIGHT)
    assert isinstance(weight, GroupFloat)
    assert (weight.group, weight.block) == (64, None)


def intx(block: Any = (1, 32), parts: Any = PARTS, **data: Any) -> str:
    return described("IntxUnpackedToInt8Tensor", block, parts, **{"target_dtype": TARGET, **data})


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ("{", "no valid JSON"),
        ("[1]", "holds no JSON object"),
        ("[" * 60_000, "nested too deeply"),
        ("{}", "lacks _type"),
        ('{"_type": 7}', "_type = 7"),
        ('{"_type": "Int4TilePackedTo4dTensor"}', "Int4TilePackedTo4dTensor', which is not read"),
        ('{"_type": "Int4PlainInt32Tensor"}', "ordered for one kind of GPU"),
        ('{"_type": "NVFP4Tensor"}', "NVFP4Tensor', which is not read: scales"),
        ('{"_type": "os.system"}', "os.system', which is not read: it is not known"),
        ('{"_type": "Int8Tensor"}', "lacks block_size"),
        ('{"_type": "Int8Tensor", "_data": 3}', "_data = 3"),
        ('{"_type": "Int8Tensor", "_tensor_data_names": "qdata"}', "_tensor_data_names = "),
        (intx(block=[1, 32, 1, 1]), "block_size = a list of 4, expected 2 or 3"),
        (intx(block=[1, 32, 1]), r"has no blocks of \[1, 32, 1\]"),
        (intx(block=[0, 32]), "block_size = a list of 2, expected 2 or 3"),
        (intx(block=[1, -32]), "block_size = a list of 2"),
        (intx(block=[1, 1 << 70]), "block_size = a list of 2"),
        (intx(block=[1, 48]), r"has no blocks of \[1, 48\]"),
        (intx(block=[1, 8]), "has groups of 8; at least 16"),
        (intx(block=[1, 64]), r"scale' has shape \[128, 2\], expected \[128, 1\]"),
        (intx(block=[2, 32]), r"scale' has shape \[128, 2\], expected \[64, 2\]"),
        (intx(target_dtype={"_data": "int9"}), "_data = 'int9', expected one of int1"),
        (intx(target_dtype="int4"), "target_dtype = 'int4'"),
        (intx(target_dtype={"_data": "int2"}), "holds codes of more than 2 bits"),
        (intx(parts=[*PARTS, "act_pre_scale"]), "act_pre_scale' scales inputs"),
        ("\ud800".encode("utf-8", "replace").decode(), "no valid JSON"),
    ],
)
def test_metadata_that_lies(made: Make, refused: Refused, entry: str, match: str) -> None:
    written = made(INTX)
    written.rewrite({}, metadata={**written.metadata, WEIGHT: entry})
    refused(written.folder, match)


@pytest.mark.parametrize(
    ("case", "part", "array", "match"),
    [
        (INTX, "qdata", None, f"lacks tensor '{PREFIX}qdata'"),
        (INTX, "qdata", np.zeros((128, 64), np.uint8), "qdata' is U8, expected I8"),
        (INTX, "qdata", np.zeros((128, 0), np.int8), r"has shape \[128, 0\]"),
        (INTX, "scale", np.full((128, 2), np.nan, np.float32), "scale' holds numbers"),
        (INTX, "zero_point", None, "lacks tensor .*zero_point'"),
        (INTX, "zero_point", np.zeros((128, 1), np.int8), r"zero_point' has shape \[128, 1\]"),
        (INTX, "zero_point", np.full((128, 2), np.inf, np.float32), "zero_point' holds numbers"),
        (INT4, "qdata", np.zeros((128, 32), np.int32), "qdata' is I32, expected I8"),
        (INT4, "scale", np.zeros((128, 2), np.float32), r"scale' has shape \[128, 2\], expected"),
        (INT4, "zero_point", np.full((2, 128), np.nan, np.float32), "zero_point' holds numbers"),
    ],
)
def test_damaged_tensors(
    made: Make, refused: Refused, case: Case, part: str, array: Any, match: str
) -> None:
    written = made(case)
    written.rewrite({PREFIX + part: array})
    refused(written.folder, match)


def test_what_is_no_torchao(made: Make, refused: Refused) -> None:
    written = made(INT8)
    refused(written.folder, "has 'torchao', which is not hqq", quantization="hqq")
    written.rewrite({WEIGHT: np.zeros((128, 64), np.float32)})
    refused(written.folder, "both plain and quantised")
    written.rewrite({WEIGHT: None}, metadata={"format": "pt"})
    refused(written.folder, "no metadata of quantised tensors")
