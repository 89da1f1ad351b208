"""ModelOpt: where its settings stand, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from polysilicon.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from polysilicon.weights.encodings import GroupFloat

from .checkpoints import Case, Written
from .conftest import Refused
from .modelopt_cases import CASES, config

Make = Callable[[Case], Written]
BY_NAME = {case.name: case for case in CASES}
NVFP4, FP8 = BY_NAME["modelopt-nvfp4"], BY_NAME["modelopt-fp8"]
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT, SCALE, FACTOR = (f"{NAME}.{end}" for end in ("weight", "weight_scale", "weight_scale_2"))


@pytest.mark.parametrize("case", [NVFP4, FP8], ids=str)
def test_the_settings_may_stand_in_a_file_of_their_own(made: Make, case: Case) -> None:
    written = made(case)
    written.rewrite({}, config={})
    algorithm = case.config["quantization_config"]["quant_algo"]
    settings = {"quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}}
    (written.folder / "hf_quant_config.json").write_text(json.dumps(settings))
    with open_checkpoint(written.folder) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert checkpoint.quantization == "modelopt"
        np.testing.assert_array_equal(
            checkpoint.weight(WEIGHT).dequantize(), written.twin.tensors[WEIGHT]
        )


def test_scales_of_activations_and_of_kv(made: Make) -> None:
    """The scale of NVFP4's activations is for their own scales, not for the activations."""
    written = made(FP8)
    written.rewrite({f"{NAME.replace('q_', 'k_')}.k_scale": np.float32(0.5)})
    with open_checkpoint(written.folder) as checkpoint:
        weight = checkpoint.weight(WEIGHT)
        assert isinstance(weight, GroupFloat)
        assert weight.input_scale == float(np.float32(0.02))
        assert checkpoint.tensors[f"{NAME.replace('q_', 'k_')}.k_scale"].shape == ()
    with open_checkpoint(made(NVFP4).folder) as checkpoint:
        weight = checkpoint.weight(WEIGHT)
        assert isinstance(weight, GroupFloat)
        assert (weight.group, weight.input_scale) == (16, None)


@pytest.mark.parametrize("algorithm", ["W4A8_AWQ", "INT8_SQ", "NVFP4_AWQ", ""])
def test_other_algorithms(made: Make, refused: Refused, algorithm: str) -> None:
    written = made(NVFP4)
    written.rewrite({}, config=config(algorithm))
    refused(written.folder, f"quant_algo '{algorithm}', which is not read: ")


def e4m3(value: float) -> np.ndarray:
    return np.full((128, 4), value, ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensor", "value", "match"),
    [
        (SCALE, e4m3(np.nan), "not finite"),
        (SCALE, e4m3(-1), "negative scales"),
        (SCALE, e4m3(1)[:, :3], r"shape \[128, 3\], expected \[128, 4\]"),
        (SCALE, np.ones((128, 4), np.float32), "is F32, expected F8_E4M3"),
        (FACTOR, None, "lacks tensor"),
        (FACTOR, np.float32(np.nan), "not finite"),
        (FACTOR, np.float32(-1), "negative"),
        (FACTOR, np.float32(3e38), "with which scales are not finite"),
        (FACTOR, np.ones(2, np.float32), "expected 1 number"),
        (WEIGHT, np.zeros((128, 33), np.uint8), "has 66 inputs, no multiple of a group's 16"),
        (WEIGHT, np.zeros((128, 32), np.int32), "is I32, expected F8_E4M3 or U8"),
        (WEIGHT, np.zeros((1, 128, 32), np.uint8), r"shape \[1, 128, 32\]"),
        (f"{NAME}.pre_quant_scale", np.ones(64, np.float32), "scales activations"),
    ],
)
def test_parts_that_cannot_be(
    made: Make, refused: Refused, tensor: str, value: np.ndarray | None, match: str
) -> None:
    written = made(NVFP4)
    written.rewrite({tensor: value})
    refused(written.folder, match)


def test_a_checkpoint_without_scales(made: Make, refused: Refused) -> None:
    written = made(NVFP4)
    written.rewrite({name: None for name in written.stored if name.endswith("weight_scale")})
    refused(written.folder, "no tensor NAME.weight_scale")
