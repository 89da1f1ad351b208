"""GPTQ: what the files say of themselves, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polysilicon.errors import ModelError
from polysilicon.models.loading import load_model
from polysilicon.reference.device import ReferenceDevice
from polysilicon.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from polysilicon.weights.encodings import GroupAffine

from .checkpoints import Case, Written
from .conftest import Refused
from .gptq_cases import CASES, case, config, words

Make = Callable[[Case], Written]
PLAIN = CASES[0]
ORDERED = CASES[1]
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{NAME}.weight"


def settings(**changes: Any) -> dict[str, Any]:
    """The quantization_config of `PLAIN` with changes."""
    base = config(4, 32, symmetric=True, order=False, format="gptq")
    return {"quantization_config": {**base["quantization_config"], **changes}}


def test_one_zero_point_is_an_offset_and_sorted_inputs_have_no_order(made: Make) -> None:
    with open_checkpoint(made(PLAIN).folder) as checkpoint:
        weight = checkpoint.weight(WEIGHT)
        assert isinstance(weight, GroupAffine)
        assert (weight.offset, weight.bias, weight.input_order) == (8, None, None)
        assert weight.scale.dtype == np.float16


def test_act_order_is_kept(made: Make) -> None:
    with open_checkpoint(made(ORDERED).folder) as checkpoint:
        weight = checkpoint.weight(WEIGHT)
        assert isinstance(weight, GroupAffine)
        assert weight.input_order is not None
        assert weight.input_order.dtype == np.int32
        assert sorted(weight.input_order) == list(range(64))


def test_the_config_may_stand_beside_or_be_left_out(made: Make, refused: Refused) -> None:
    """Early AutoGPTQ wrote quantize_config.json; bits and groups follow from the shapes anyway."""
    written = made(ORDERED)
    path = written.folder / "config.json"
    path.write_text(json.dumps(written.twin.config))
    refused(written.folder, "qweight' as I32: it is quantised by a method that its config.json")
    with open_checkpoint(written.folder, quantization="gptq") as checkpoint:
        np.testing.assert_array_equal(
            checkpoint.weight(WEIGHT).dequantize(), written.twin.tensors[WEIGHT]
        )
    sidecar = written.folder / "quantize_config.json"
    sidecar.write_text('{"bits": 4, "group_size": 32, "desc_act": true, "sym": false}')
    with open_checkpoint(written.folder) as checkpoint:
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert checkpoint.quantization == "gptq"
        np.testing.assert_array_equal(
            checkpoint.weight(WEIGHT).dequantize(), written.twin.tensors[WEIGHT]
        )


def test_the_group_index_may_be_left_out(made: Make) -> None:
    written = made(PLAIN)
    written.rewrite({name: None for name in written.stored if name.endswith(".g_idx")})
    with open_checkpoint(written.folder) as checkpoint:
        np.testing.assert_array_equal(
            checkpoint.weight(WEIGHT).dequantize(), written.twin.tensors[WEIGHT]
        )


def test_zero_points_borrow_across_a_word(made: Make) -> None:
    """A zero point of 0 is stored as -1, which takes 1 from its neighbour's code."""
    written = made(case(4, 32, symmetric=False, order=False, format="gptq"))
    zeros = np.zeros((2, 128), np.uint8)
    zeros[:, 1::2] = 5
    plain = words(zeros, 4)
    less = (plain.view("<u4") - np.uint32(0x11111111)).view("<i4")
    assert less[0, 0] & 0xFF == 0x3F
    written.rewrite({f"{NAME}.qzeros": less})
    with open_checkpoint(written.folder) as checkpoint:
        first = checkpoint.weight(WEIGHT).dequantize()
    written.rewrite({f"{NAME}.qzeros": plain})
    with open_checkpoint(written.folder, quantization="gptq_v2") as checkpoint:
        np.testing.assert_array_equal(checkpoint.weight(WEIGHT).dequantize(), first)


def test_biases_of_zeros_are_no_biases(made: Make) -> None:
    """AutoGPTQ gave every linear a bias, of zeros where the model has none."""
    written, device = made(PLAIN), ReferenceDevice()
    biases = {
        f"model.layers.{layer}.{name}.bias": np.zeros(size, np.float16)
        for layer in range(2)
        for name, size in (("self_attn.q_proj", 128), ("mlp.down_proj", 64))
    }
    written.rewrite(biases)
    with open_checkpoint(written.folder) as checkpoint:
        load_model(checkpoint, device)
    written.rewrite({name: array + 1 for name, array in biases.items()})
    with (
        open_checkpoint(written.folder) as checkpoint,
        pytest.raises(ModelError, match=r"bias', for which llama"),
    ):
        load_model(checkpoint, device)
    device.close()


def test_large_groups_are_split(made: Make) -> None:
    """Devices run groups of at most 256, or whole rows."""
    written = made(PLAIN)
    columns, rows = 1024, 32
    rng = np.random.default_rng()
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    scale = rng.uniform(0.01, 0.02, (2, rows)).astype(np.float16)
    changes = {
        f"{NAME}.qweight": words(codes, 4).T,
        f"{NAME}.qzeros": words(np.full((2, rows), 7, np.uint8), 4),
        f"{NAME}.scales": scale,
        f"{NAME}.g_idx": np.arange(columns, dtype=np.int32) // 512,
    }
    written.rewrite(changes, settings(dynamic={"+:.*": {"group_size": 512}}))
    with open_checkpoint(written.folder) as checkpoint:
        weight = checkpoint.weight(WEIGHT)
    assert isinstance(weight, GroupAffine)
    assert weight.group == 256
    expected = np.repeat(scale.T.astype(np.float32), 512, axis=1) * (codes.astype(np.float32) - 8)
    np.testing.assert_array_equal(weight.dequantize(), expected)


def test_modules_may_differ_where_the_config_says_so(made: Make, refused: Refused) -> None:
    """`dynamic` overrides single modules: what they have follows from their shapes."""
    written = made(PLAIN)
    other = made(case(8, 32, symmetric=True, order=False, format="gptq"))
    values = other.twin.tensors[WEIGHT]
    own = {name: array for name, array in other.stored.items() if name.startswith(NAME)}
    written.rewrite(own, settings())
    refused(written.folder, "has 8 bits and groups of 32, but .* says 4 bits")
    written.rewrite(own, settings(dynamic={r"+:.*q_proj": {"bits": 8}, "-:.*down.*": {}}))
    with open_checkpoint(written.folder) as checkpoint:
        assert checkpoint.tensors[WEIGHT].type == "gptq:8"
        np.testing.assert_array_equal(checkpoint.weight(WEIGHT).dequantize(), values)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 3}, "has 4 bits and groups of 32, but .* says 3 bits"),
        ({"group_size": 64}, "says 4 bits and groups of 64"),
        ({"group_size": -1}, "says 4 bits and groups of -1"),
        ({"bits": "4"}, "bits = '4', expected an integer"),
        ({"bits": 10**40}, "bits = an integer of more than 128 bits"),
        ({"bits": True}, "bits = True"),
        ({"group_size": [32]}, "group_size = a list of 1"),
        ({"group_size": float("nan")}, "group_size = nan"),
        ({"checkpoint_format": "marlin"}, "laid out as 'marlin'"),
        ({"checkpoint_format": "gptq_p"}, "laid out as 'gptq_p', which is not read: codes"),
        ({"checkpoint_format": 7}, "checkpoint_format = 7"),
        ({"checkpoint_format": None, "is_marlin_format": True}, "laid out as 'marlin'"),
        ({"dynamic": [1]}, "dynamic = a list of 1, expected a mapping"),
    ],
)
def test_a_config_that_lies(
    made: Make, refused: Refused, changes: dict[str, Any], match: str
) -> None:
    written = made(PLAIN)
    written.rewrite({}, settings(**changes))
    refused(written.folder, match)


def damaged(part: str, array: Any) -> dict[str, Any]:
    return {f"{NAME}.{part}": array}


def grouped(groups: int) -> dict[str, Any]:
    return {
        **damaged("scales", np.ones((groups, 128), np.float16)),
        **damaged("qzeros", np.zeros((groups, 16), np.int32)),
    }


QWEIGHT, QZEROS, SCALES = (8, 128), (2, 16), (2, 128)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (damaged("qzeros", None), f"lacks tensor '{NAME}.qzeros'"),
        (damaged("scales", None), f"lacks tensor '{NAME}.scales'"),
        (damaged("qweight", np.zeros(QWEIGHT, np.int16)), "qweight' is I16, expected I32"),
        (damaged("qweight", np.zeros((8, 128, 1), np.int32)), r"\[8, 128, 1\], expected"),
        (damaged("qweight", np.zeros((0, 128), np.int32)), r"has shape \[0, 128\]"),
        (damaged("qweight", np.zeros((7, 128), np.int32)), r"g_idx' .* expected \[56\]"),
        (damaged("qweight", np.zeros((10, 128), np.int32)), r"g_idx' .* expected \[80\]"),
        (damaged("qweight", np.zeros((4, 128), np.int32)), r"g_idx' .* expected \[32\]"),
        (damaged("qweight", np.zeros((8, 127), np.int32)), r"scales' .* expected \[any, 127\]"),
        (damaged("qweight", np.zeros((8, 120), np.int32)), r"scales' has shape \[2, 128\]"),
        (damaged("qzeros", np.zeros((2, 15), np.int32)), "15 words a group, which are not 128"),
        (damaged("qzeros", np.zeros((2, 20), np.int32)), "20 words a group, which are not 128"),
        (damaged("qzeros", np.zeros((2, 8), np.int32)), r"g_idx' .* expected \[128\]"),
        (damaged("qzeros", np.zeros((2, 0), np.int32)), r"qzeros' has shape \[2, 0\]"),
        (damaged("qzeros", np.zeros((1, 16), np.int32)), r"qzeros' has shape \[1, 16\]"),
        (damaged("qzeros", np.zeros(QZEROS, np.float32)), "qzeros' is F32"),
        (damaged("scales", np.zeros(SCALES, np.int32)), "scales' is I32, expected F16"),
        (damaged("scales", np.full(SCALES, np.nan, np.float16)), "scales' holds numbers that are"),
        (damaged("scales", np.full(SCALES, np.inf, np.float32)), "scales' holds numbers that are"),
        (damaged("scales", np.zeros((3, 128), np.float16)), r"qzeros' has shape \[2, 16\]"),
        (grouped(3), "not codes of 4 bits in 3 groups"),
        (grouped(8), "has groups of 8; at least 16"),
        (damaged("g_idx", np.arange(64, dtype=np.int32) // 16), r"groups outside 0\.\.1"),
        (damaged("g_idx", np.arange(64, dtype=np.int32) // 32 - 1), r"groups outside 0\.\.1"),
        (damaged("g_idx", np.zeros(64, np.int32)), "does not give each group 32 inputs"),
        (damaged("g_idx", np.zeros(64, np.float32)), "g_idx' is F32"),
        (damaged("g_idx", np.zeros((8, 8), np.int32)), "g_idx' has shape"),
        (damaged("g_idx", np.zeros(63, np.int32)), r"g_idx' .* expected \[64\]"),
        (damaged("g_idx", np.zeros(0, np.int32)), r"g_idx' has shape \[0\]"),
        (damaged("weight", np.zeros((128, 64), np.float32)), "both plain and quantised"),
    ],
)  # fmt: skip
def test_damaged_tensors(made: Make, refused: Refused, changes: dict[str, Any], match: str) -> None:
    written = made(PLAIN)
    written.rewrite(changes)
    refused(written.folder, match)


def test_another_format_is_no_gptq(made: Make, refused: Refused) -> None:
    written = made(PLAIN)
    refused(written.folder, "has 'gptq', which is not awq", quantization="awq")
    refused(written.folder, "has 'gptq', which is not dense", quantization="dense")
    written.twin.write(written.folder)
    refused(written.folder, "has no tensor NAME.qweight", quantization="gptq")
