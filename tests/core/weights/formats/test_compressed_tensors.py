"""compressed-tensors: groups and their targets, what is kept of the files, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polysilicon.errors import ModelError
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import GroupAffine, GroupFloat, Weight
from polysilicon.weights.fields import Fields
from polysilicon.weights.formats.compressed_tensors_config import Schemes, read_schemes

from .checkpoints import Case, Written
from .compressed_tensors_cases import CASES, arguments, config, group
from .conftest import Refused

Make = Callable[[Case], Written]
BY_NAME = {case.name: case for case in CASES}
SYMMETRIC, ASYMMETRIC = BY_NAME["ct-int4-32-sym"], BY_NAME["ct-int4-16"]
ORDERED, NVFP4 = BY_NAME["ct-int4-32-order"], BY_NAME["ct-nvfp4"]
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{NAME}.weight"
INT4 = arguments(4, "int", "group", group_size=32)
FP8 = arguments(8, "float", "channel")


def read(written: Written, name: str = WEIGHT) -> Weight:
    with open_checkpoint(written.folder) as checkpoint:
        return checkpoint.weight(name)


def schemes(*groups: dict[str, Any], modules: tuple[str, ...] = (), **further: Any) -> Schemes:
    settings = config("mixed-precision", *groups)["quantization_config"] | further
    return read_schemes(Fields(settings, "config.json"), modules)


def test_codes_of_whole_words_are_views(made: Make) -> None:
    weight = read(made(SYMMETRIC))
    assert isinstance(weight, GroupAffine)
    assert (weight.offset, weight.bias, weight.input_order) == (8, None, None)
    assert not weight.codes.flags.writeable


def test_groups_of_inputs_are_kept(made: Make) -> None:
    written = made(ORDERED)
    weight = read(written)
    assert isinstance(weight, GroupAffine)
    assert weight.input_order is not None
    assert sorted(weight.input_order) == list(range(64))
    # The writer's own beginning, which says nothing.
    index = f"{NAME}.weight_g_idx"
    written.rewrite({index: np.full(64, -1, np.int32)})
    weight = read(written)
    assert isinstance(weight, GroupAffine)
    assert weight.input_order is None


@pytest.mark.parametrize("name", ["ct-w8a8-static", "ct-fp8-static"])
def test_static_scales_of_activations(made: Make, name: str) -> None:
    written = made(BY_NAME[name])
    weight = read(written)
    assert isinstance(weight, (GroupAffine, GroupFloat))
    assert weight.input_scale == float(written.stored[f"{NAME}.input_scale"][0])


def test_scales_of_asymmetric_activations_are_of_no_use(made: Make) -> None:
    written = made(BY_NAME["ct-w8a8-static"])
    inputs = arguments(8, "int", "tensor", symmetric=False)
    rows = arguments(8, "int", "channel", symmetric=False)
    written.rewrite({}, config=config("int-quantized", group(rows, inputs)))
    weight = read(written)
    assert isinstance(weight, GroupAffine)
    assert weight.input_scale is None


def test_scales_of_kv_are_passed_over(made: Make) -> None:
    written = made(SYMMETRIC)
    scale = "model.layers.0.self_attn.k_scale"
    written.rewrite({scale: np.ones(1, ml_dtypes.bfloat16)})
    with open_checkpoint(written.folder) as checkpoint:
        assert checkpoint.tensors[scale].shape == (1,)
        np.testing.assert_array_equal(
            checkpoint.weight(WEIGHT).dequantize(), written.twin.tensors[WEIGHT]
        )


def test_a_name_goes_before_an_expression_and_that_before_a_class() -> None:
    modules = (
        "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
        "model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj", "model.embed_tokens",
    )  # fmt: skip
    found = schemes(
        group(INT4),
        group(FP8, targets=("re:.*self_attn", "model.layers.1.mlp.up_proj")),
        group(arguments(8, "int", "channel"), targets=("model.layers.0.self_attn.k_proj",)),
        group(arguments(6, "int", "channel"), targets=("Embedding",)),
        modules=modules,
    )
    assert [(found.of(module).kind, found.of(module).bits) for module in modules] == [
        ("float", 8), ("int", 8), ("float", 8), ("int", 4), ("int", 6),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "expression",
    [
        "model",
        r"model\.layers\.\d{1,2}\.mlp",
        "^model.*proj$",
        "(a|model).layers.[0-9]{1}",
        "(?i)MODEL",
    ],
)
def test_an_expression_matches_at_the_beginning(expression: str) -> None:
    modules = ("model.layers.0.mlp.up_proj", "x.model.layers.0.mlp.up_proj")
    found = schemes(
        group(INT4, targets=("re:layers",)),
        group(FP8, targets=(f"re:{expression}",)),
        modules=modules,
    )
    assert found.of(modules[0]).bits == 8
    with pytest.raises(ModelError, match=r"no config_groups for module 'x\.model"):
        found.of(modules[1])


def test_strategies_follow_from_group_sizes() -> None:
    """What older versions left out."""
    for size, expected in ((32, (32, False)), (-1, (None, False)), (None, (None, True))):
        (scheme,) = schemes(group({"num_bits": 4, "group_size": size})).schemes
        assert (scheme.group, scheme.single) == expected
    (scheme,) = schemes(group(arguments(8, "float", "block", block_structure="128x64"))).schemes
    assert scheme.block == (128, 64)


@pytest.mark.parametrize(
    ("groups", "further", "match"),
    [
        ([], {}, "no config_groups with weights"),
        ([group(INT4) | {"weights": None}], {}, "no config_groups with weights"),
        ([group(INT4)], {"format": "marlin-24"}, "the format 'marlin-24'"),
        ([group(INT4, format="int6")], {}, "the format 'int6', which is not read: it is not known"),
        ([group(INT4)], {"sparsity_config": {"format": "sparse-24-bitmask"}}, "weights are sparse"),
        ([group(INT4)], {"transform_config": {"config_groups": {"R1": {}}}}, "transforms of"),
        ([group(INT4)], {"ignore": "lm_head"}, "ignore"),
        ([group(INT4)], {"config_groups": {"W4A16": ["Linear"]}}, "W4A16"),
        ([group(INT4)], {"config_groups": [1]}, "config_groups"),
        ([group(INT4)] * 257, {}, "at most 256 groups"),
        ([group(INT4 | {"num_bits": 9})], {}, "type 'int' of 9 bits"),
        ([group(INT4 | {"num_bits": 1})], {}, "type 'int' of 1 bits"),
        ([group(INT4 | {"num_bits": "4"})], {}, "num_bits"),
        ([group(INT4 | {"type": "float", "num_bits": 5})], {}, "type 'float' of 5 bits"),
        ([group(FP8 | {"symmetric": False})], {}, "zero points of floats"),
        ([group(INT4 | {"strategy": "attn_head"})], {}, "the strategy 'attn_head'"),
        ([group(INT4 | {"group_size": None})], {}, "group_size"),
        ([group(FP8 | {"strategy": "block"})], {}, "block_structure"),
        ([group(FP8 | {"strategy": "block", "block_structure": "128"})], {}, "block_structure"),
        ([group(INT4, targets=("re:(?=a)",))], {}, r"expression '\(\?=a\)' in targets"),
        ([group(INT4)], {"ignore": ["re:("]}, r"expression '\(' in ignore"),
        ([group(INT4)], {"ignore": ["re:a{9}{9}{9}"]}, "counted repetition"),
        ([group(INT4)], {"ignore": ["re:" + "a" * 513]}, "at most 512 characters"),
    ],
)
def test_configs_that_cannot_be(
    groups: list[dict[str, Any]], further: dict[str, Any], match: str
) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        schemes(*groups, **further)
    assert len(str(caught.value)) < 600


def test_expressions_that_backtrack_for_ever_elsewhere() -> None:
    modules = ("a" * 500, "b" * 600)
    begin = time.monotonic()
    found = schemes(
        group(INT4), modules=modules, ignore=[r"re:(a|a)*(.*.*.*.*)*\d$", r"re:(\w*)*!"]
    )
    # A watchdog: an engine that backtracks would be here until the end of time.
    assert time.monotonic() - begin < 30
    assert found.of(modules[0]).bits == 4


def test_more_expressions_than_can_be_matched() -> None:
    modules = tuple(f"m{index}" for index in range(1000))
    with pytest.raises(ModelError, match="ignore = a list of 9000, expected fewer expressions"):
        schemes(group(INT4), modules=modules, ignore=["re:x"] * 9000)


def test_groups_that_overlap_and_modules_that_are_ignored() -> None:
    found = schemes(
        group(INT4, targets=("re:.*q_proj",)),
        group(FP8, targets=("re:.*self_attn.*",)),
        modules=(NAME, "lm_head", "model.layers.0.mlp.down_proj"),
        ignore=["lm_head", "re:.*down"],
    )
    with pytest.raises(ModelError, match=r"2 config_groups for module .*q_proj"):
        found.of(NAME)
    for module in ("lm_head", "model.layers.0.mlp.down_proj"):
        with pytest.raises(ModelError, match=f"{module}' under ignore, but it is quantised"):
            found.of(module)


def part(end: str) -> str:
    return f"{NAME}.{end}"


SCALES = np.ones((128, 2), np.float16)
PARTS: list[tuple[Case, str, Any, str]] = [
    (SYMMETRIC, "weight_shape", None, "lacks tensor"),
    (SYMMETRIC, "weight_shape", np.array([128, 65]), "do not hold so many codes of 4 bits"),
    (SYMMETRIC, "weight_shape", np.array([127, 64]), "do not hold"),
    (SYMMETRIC, "weight_shape", np.array([128, -64]), "do not hold"),
    (SYMMETRIC, "weight_shape", np.array([128, 1 << 62]), "do not hold"),
    (SYMMETRIC, "weight_shape", np.array([2, 64, 64]), r"shape \[3\], expected \[2\]"),
    (SYMMETRIC, "weight_packed", None, "lacks tensor"),
    (SYMMETRIC, "weight_packed", np.zeros((128, 8), np.uint8), "is U8, expected I32"),
    (SYMMETRIC, "weight_packed", np.zeros((128, 7), np.int32), "128 rows of 7 words"),
    (SYMMETRIC, "weight_scale", None, "lacks tensor"),
    (SYMMETRIC, "weight_scale", SCALES * np.nan, "not finite"),
    (SYMMETRIC, "weight_scale", SCALES * np.float16(np.inf), "not finite"),
    (SYMMETRIC, "weight_scale", SCALES[:, :1].repeat(3, axis=1), r"shape \[128, 3\]"),
    (SYMMETRIC, "weight_scale", SCALES.astype(np.int32), "is I32"),
    (SYMMETRIC, "weight", np.zeros((128, 64), np.float16), "one weight is stored once"),
    (ASYMMETRIC, "weight_zero_point", None, "lacks tensor"),
    (ASYMMETRIC, "weight_zero_point", np.zeros((15, 4), np.int32), r"shape \[15, 4\] of I32"),
    (ASYMMETRIC, "weight_zero_point", np.zeros((128, 3), np.int8), r"shape \[128, 3\] of I8"),
    (ORDERED, "weight_g_idx", np.zeros(64, np.int32), "does not give each group 32 inputs"),
    (ORDERED, "weight_g_idx", np.arange(64, dtype=np.int32), "names groups outside 0..1"),
    (ORDERED, "weight_g_idx", np.full(64, -7, np.int32), "names groups outside"),
    (ORDERED, "weight_g_idx", np.zeros(63, np.int32), r"shape \[63\], expected \[64\]"),
    (NVFP4, "weight_global_scale", np.zeros(1, np.float32), "with which scales are not finite"),
    (NVFP4, "weight_global_scale", None, "lacks tensor"),
    (NVFP4, "weight_scale", np.ones((128, 4), np.float32), "is F32, expected F8_E4M3"),
    (NVFP4, "weight_packed", np.zeros((128, 32), np.int32), "is I32, expected U8"),
    (BY_NAME["ct-w8a8"], "weight", np.zeros((128, 64), np.float16), "is F16, expected I8"),
    (BY_NAME["ct-w8a8-static"], "input_scale", np.float32([np.nan]), "not finite"),
    (BY_NAME["ct-fp8-rows"], "weight", np.zeros((128, 64), np.int8), "is I8, expected F8_E4M3"),
    (BY_NAME["ct-fp8-rows"], "weight_scale", np.ones((64, 1), np.float32), "does not fit"),
    (BY_NAME["ct-mxfp4"], "weight_scale", np.full((128, 2), 255, np.uint8), "that are NaN"),
    (BY_NAME["ct-mxfp6"], "weight_packed", np.zeros((128, 47), np.uint8), "rows of 47 bytes"),
    (BY_NAME["ct-mxfp6"], "weight_scale", np.zeros((128, 1), np.uint8), r"shape \[128, 1\]"),
    (BY_NAME["ct-mxfp8"], "weight_scale", np.full((128, 3), 99, np.uint8), r"\[128, 3\]"),
]


@pytest.mark.parametrize(("case", "end", "value", "match"), PARTS)
def test_parts_that_cannot_be(
    made: Make, refused: Refused, case: Case, end: str, value: np.ndarray | None, match: str
) -> None:
    written = made(case)
    written.rewrite({part(end): value})
    refused(written.folder, match)


def test_integers_that_lie_about_their_bits(made: Make, refused: Refused) -> None:
    written = made(BY_NAME["ct-w8a8"])
    rows = arguments(4, "int", "channel")
    written.rewrite({}, config=config("int-quantized", group(rows)))
    refused(written.folder, "holds integers of more than 4 bits")
    written = made(SYMMETRIC)
    written.rewrite({}, config=config("pack-quantized", group(INT4 | {"num_bits": 8})))
    refused(written.folder, "do not hold so many codes of 8 bits")


def test_small_integers_in_bytes(made: Make) -> None:
    """As `int-quantized` stores 4 bits."""
    written = made(BY_NAME["ct-w8a8"])
    weight = (np.arange(128 * 64) % 16 - 8).astype(np.int8).reshape(128, 64)
    modules = [name for name in written.stored if name.endswith("proj.weight")]
    written.rewrite(
        {name: written.stored[name] >> 4 for name in modules} | {WEIGHT: weight},
        config=config("int-quantized", group(arguments(4, "int", "channel"))),
    )
    found = read(written)
    assert found.encoding == "affine:4/64"
    scale = written.stored[part("weight_scale")].astype(np.float32)
    np.testing.assert_array_equal(found.dequantize(), scale * weight.astype(np.float32))


def test_a_checkpoint_that_names_no_groups(made: Make, refused: Refused) -> None:
    written = made(SYMMETRIC)
    written.rewrite({}, config={})
    refused(written.folder, "no quantization_config", quantization="compressed-tensors")
    plain = {name: None for name in written.stored if "weight_" in name}
    written.rewrite(plain, config=SYMMETRIC.config)
    refused(written.folder, "no tensor NAME.weight_scale")
