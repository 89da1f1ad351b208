"""MLX: against MLX itself where it is installed, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import Dense, GroupAffine

from .checkpoints import Case, Written
from .conftest import Refused
from .mlx_cases import CASES, FIRST, LAST

Make = Callable[[Case], Written]
BY_NAME = {case.name: case for case in CASES}
FOUR = BY_NAME["mlx-affine-4-32"]
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{NAME}.weight"


def settings(case: Case, changes: dict[str, Any]) -> dict[str, Any]:
    return {"quantization": {**case.config["quantization"], **changes}}


def test_modules_have_parameters_of_their_own(made: Make) -> None:
    with open_checkpoint(made(FOUR).folder) as checkpoint:
        own = checkpoint.weight(f"{FIRST}.weight")
        assert isinstance(own, GroupAffine)
        assert (own.bits, own.group) == (6, 32)
        assert isinstance(checkpoint.weight(f"{LAST}.weight"), Dense)
        embedding = checkpoint.weight("model.embed_tokens.weight")
        assert isinstance(embedding, GroupAffine)
        assert embedding.scale.dtype == ml_dtypes.bfloat16


def test_a_stack_of_experts(made: Make) -> None:
    """mlx-lm stores the experts of a layer as one tensor."""
    written = made(FOUR)
    parts = {f"{NAME}.{part}": written.stored[f"{NAME}.{part}"] for part in ("scales", "biases")}
    stacked = {
        name.replace(NAME, "experts"): np.stack([array, array * 2])
        for name, array in {WEIGHT: written.stored[WEIGHT] // 2, **parts}.items()
    }
    written.rewrite(stacked)
    with open_checkpoint(written.folder) as checkpoint:
        stack = checkpoint.weight("experts.weight")
    assert stack.shape == (2, 128, 64)
    single = stacked["experts.weight"][1]
    written.rewrite({WEIGHT: single, **{n: 2 * a for n, a in parts.items()}})
    with open_checkpoint(written.folder) as checkpoint:
        expected = checkpoint.weight(WEIGHT).dequantize()
    np.testing.assert_array_equal(stack.dequantize()[1], expected)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 8}, "no groups of 32 codes of 8 bits|scales' has shape"),
        ({"bits": 7}, "bits = 7, expected 2, 3, 4, 5, 6 or 8"),
        ({"bits": 1}, "bits = 1, expected"),
        ({"bits": "4"}, "bits = '4'"),
        ({"bits": 1 << 200}, "more than 128 bits"),
        ({"group_size": 64}, "scales' has shape"),
        ({"group_size": 128}, "no groups of 128"),
        ({"group_size": 48}, "group_size = 48, expected"),
        ({"group_size": 0}, "group_size = 0"),
        ({"mode": "mxfp4"}, "scales' is BF16, expected U8"),
        ({"mode": "affine2"}, "mode = 'affine2', expected one of affine, mxfp4"),
        ({"mode": 4}, "mode = 4"),
        ({NAME: False}, "though config.json says that it is not quantised"),
        ({NAME: "no"}, f"{NAME} = 'no', expected true or false"),
        ({NAME: {"group_size": 32, "bits": 3}}, "q_proj.weight' has 8 words a row"),
        ({NAME: {"mode": "nvfp4", "group_size": 32}}, "group_size = 32, expected 16"),
        ({NAME: {"mode": "mxfp8", "bits": 4}}, "bits = 4, expected 8"),
    ],
)
def test_a_config_that_lies(
    made: Make, refused: Refused, changes: dict[str, Any], match: str
) -> None:
    written = made(FOUR)
    written.rewrite({}, settings(FOUR, changes))
    refused(written.folder, match)


@pytest.mark.parametrize(
    ("case", "part", "array", "match"),
    [
        ("mlx-affine-4-32", "biases", None, "lacks tensor .*biases'"),
        ("mlx-affine-4-32", "weight", np.zeros((128, 8), np.int32), "weight' is I32, expected U32"),
        ("mlx-affine-4-32", "weight", np.zeros(8, np.uint32), r"shape \[8\], which is no matrix"),
        ("mlx-affine-4-32", "weight", np.zeros((128, 7), np.uint32), "no groups of 32 codes"),
        ("mlx-affine-4-32", "weight", np.zeros((0, 8), np.uint32), r"has shape \[0, 8\]"),
        ("mlx-affine-4-32", "scales", np.zeros((128, 2), np.uint8), "scales' is U8, expected F16"),
        ("mlx-affine-4-32", "scales", np.zeros((127, 2), np.float32), r"shape \[127, 2\]"),
        ("mlx-affine-4-32", "scales", np.full((128, 2), np.nan, np.float32), "not finite"),
        ("mlx-affine-4-32", "biases", np.full((128, 2), -np.inf, np.float16), "biases' .* finite"),
        ("mlx-affine-4-32", "scales", np.full((128, 2), -3e38, np.float32), "so large"),
        ("mlx-mxfp4-4-32", "scales", np.full((128, 2), 255, np.uint8), "scales' .* not finite"),
        ("mlx-mxfp4-4-32", "scales", np.full((128, 2), 254, np.uint8), "so large"),
        ("mlx-nvfp4-4-16", "scales", np.full((128, 4), 0x7F, np.uint8), "scales' .* not finite"),
        ("mlx-mxfp8-8-32", "weight", np.full((128, 16), -1, np.int32), "weight' is I32"),
        ("mlx-mxfp8-8-32", "weight", np.full((128, 16), 0x7F00, np.uint32), "weight' .* finite"),
    ],
)
def test_damaged_tensors(
    made: Make, refused: Refused, case: str, part: str, array: Any, match: str
) -> None:
    written = made(BY_NAME[case])
    written.rewrite({f"{NAME}.{part}": array})
    refused(written.folder, match)


def test_what_is_no_mlx(made: Make, refused: Refused) -> None:
    written = made(FOUR)
    refused(written.folder, "has 'mlx', which is not gptq", quantization="gptq")
    written.twin.write(written.folder)
    refused(written.folder, "has no quantization in its config.json", quantization="mlx")


MODES = [
    *[("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)],
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_what_mlx_quantises_is_read_as_mlx_reads_it(
    tmp_path: Path, mode: str, bits: int, group: int, dtype: str
) -> None:
    """Exactly: MLX computes in float32 from float32 scales, as which all others are exact too."""
    mx = pytest.importorskip("mlx.core")
    values = np.random.default_rng().standard_normal((24, 256), np.float32)
    parts = mx.quantize(
        mx.array(values).astype(getattr(mx, dtype)), group_size=group, bits=bits, mode=mode
    )
    stored = {"a.weight": parts[0], "a.scales": parts[1]}
    if mode == "affine":
        stored["a.biases"] = parts[2]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    (tmp_path / "config.json").write_text(
        f'{{"quantization": {{"group_size": {group}, "bits": {bits}, "mode": "{mode}"}}}}'
    )
    wide = [part.astype(mx.float32) if part.dtype != mx.uint8 else part for part in parts[1:]]
    expected = mx.dequantize(parts[0], *wide, group_size=group, bits=bits, mode=mode)
    expected = np.array(expected.astype(mx.float32))
    with open_checkpoint(tmp_path) as checkpoint:
        got = checkpoint.weight("a.weight").dequantize()
    # Whether the product and the sum are rounded once or twice is the compiler's choice.
    bound = 3 * np.spacing(np.abs(values).max()) if mode == "affine" else 0
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound)
