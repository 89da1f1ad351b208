"""AWQ: what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polysilicon.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from polysilicon.weights.encodings import Dense, GroupAffine

from .awq_cases import CASES
from .checkpoints import Case, Written
from .conftest import Refused

Make = Callable[[Case], Written]
GEMM, ROWS, GEMV, _, AUTO_ROUND = CASES
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{NAME}.weight"


def settings(case: Case, **changes: Any) -> dict[str, Any]:
    return {"quantization_config": {**case.config["quantization_config"], **changes}}


def test_excluded_modules_pass_through(made: Make) -> None:
    with open_checkpoint(made(ROWS).folder) as checkpoint:
        assert isinstance(checkpoint.weight("model.layers.1.mlp.down_proj.weight"), Dense)
        weight = checkpoint.weight(WEIGHT)
        assert isinstance(weight, GroupAffine)
        assert (weight.offset, weight.bias, weight.group) == (8, None, 64)


def test_the_config_may_stand_beside(made: Make) -> None:
    written = made(GEMM)
    (written.folder / "config.json").write_text(json.dumps(written.twin.config))
    (written.folder / "quant_config.json").write_text(
        '{"zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}'
    )
    with open_checkpoint(written.folder) as checkpoint:
        np.testing.assert_array_equal(
            checkpoint.weight(WEIGHT).dequantize(), written.twin.tensors[WEIGHT]
        )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 8}, "says 8 bits, but AWQ is read with 4"),
        ({"w_bit": 3}, "says 3 bits"),
        ({"version": "gemv_fast"}, "laid out as 'gemv_fast'"),
        ({"version": None, "format": "llm-awq"}, "laid out as 'llm-awq'"),
        ({"backend": "llm-awq"}, "laid out as 'llm-awq'"),
        ({"version": "gemv"}, "tensor .* has"),
        ({"version": 4}, "version = 4, expected a string"),
        ({"zero_point": False}, "no zero points"),
        ({"zero_point": "yes"}, "zero_point = 'yes'"),
        ({"group_size": 64}, "groups of 32, which is not what the config says"),
        ({"group_size": "32"}, "group_size = '32'"),
        ({"group_size": -7}, "group_size = -7"),
    ],
)
def test_a_config_that_lies(
    made: Make, refused: Refused, changes: dict[str, Any], match: str
) -> None:
    written = made(GEMM)
    written.rewrite({}, settings(GEMM, **changes))
    refused(written.folder, match)


def test_auto_round_says_which_layout_it_is(made: Make, refused: Refused) -> None:
    written = made(AUTO_ROUND)
    with open_checkpoint(written.folder) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert checkpoint.quantization == "awq"
    refused(written.folder, "laid out as 'auto_round:auto_awq', .* it is awq", quantization="gptq")
    for packing, match in {
        "auto_round:auto_gptq": "packing_format = 'auto_round:auto_gptq', expected auto_round:",
        "auto_round:fake": "packing_format = 'auto_round:fake'",
    }.items():
        written.rewrite({}, settings(AUTO_ROUND, packing_format=packing))
        refused(written.folder, match, quantization="awq")
    refused(written.folder, "laid out as 'auto_round:fake', .* it is not known")
    written.rewrite({}, settings(AUTO_ROUND, packing_format=7))
    refused(written.folder, "packing_format = 7, expected a string")


def test_gemv_needs_the_group_size(made: Make, refused: Refused) -> None:
    written = made(GEMV)
    written.rewrite({}, settings(GEMV, group_size=None))
    refused(written.folder, "nowhere which group size")
    written.rewrite({}, settings(GEMV, group_size=24))
    refused(written.folder, "no whole groups of 24")
    written.rewrite({}, settings(GEMV, group_size=8))
    refused(written.folder, "has groups of 8")


@pytest.mark.parametrize(
    ("part", "array", "match"),
    [
        ("qzeros", None, f"lacks tensor '{NAME}.qzeros'"),
        ("qweight", np.zeros((64, 16), np.int64), "qweight' is I64, expected I32"),
        ("qweight", np.zeros((64, 15), np.int32), r"scales' has shape \[2, 128\]"),
        ("qweight", np.zeros((63, 16), np.int32), "has 2 groups for 63 inputs"),
        ("qweight", np.zeros((128, 16), np.int32), "groups of 64, which is not what"),
        ("qweight", np.zeros((64, 0), np.int32), r"has shape \[64, 0\]"),
        ("qzeros", np.zeros((4, 16), np.int32), r"qzeros' has shape \[4, 16\]"),
        ("scales", np.full((2, 128), np.nan, np.float16), "scales' holds numbers that are not"),
        ("weight", np.zeros((128, 64), np.float32), "both plain and quantised"),
    ],
)
def test_damaged_tensors(made: Make, refused: Refused, part: str, array: Any, match: str) -> None:
    written = made(GEMM)
    written.rewrite({f"{NAME}.{part}": array})
    refused(written.folder, match)


def test_another_format_is_no_awq(made: Make, refused: Refused) -> None:
    written = made(GEMM)
    refused(written.folder, "has 'awq', which is not gptq", quantization="gptq")
    (written.folder / "config.json").write_text(json.dumps(written.twin.config))
    refused(written.folder, r"scales' has shape", quantization="gptq")
    written.twin.write(written.folder)
    refused(written.folder, "has no tensor NAME.qweight", quantization="awq")
