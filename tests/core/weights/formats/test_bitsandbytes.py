"""bitsandbytes: what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import GroupFloat

from .bitsandbytes_cases import CASES, state
from .checkpoints import Case, Written
from .conftest import Refused

Make = Callable[[Case], Written]
NESTED, PLAIN, _, _, EIGHT = CASES
NAME = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{NAME}.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
SAID = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}


def test_blocks_that_cross_rows_become_smaller_groups(made: Make) -> None:
    """Rows of 96 in blocks of 64: groups of 32 have one scale each."""
    with open_checkpoint(made(PLAIN).folder) as checkpoint:
        down = checkpoint.weight("model.layers.0.mlp.down_proj.weight")
        query = checkpoint.weight(WEIGHT)
    assert isinstance(down, GroupFloat)
    assert isinstance(query, GroupFloat)
    assert (down.shape, down.group, query.group) == ((64, 96), 32, 64)


def test_bytes_stored_as_numbers_of_another_type(made: Make) -> None:
    """bnb_4bit_quant_storage: the same bytes under another name."""
    written = made(NESTED)
    for dtype in (np.float16, np.float32, np.int8):
        written.rewrite({WEIGHT: written.stored[WEIGHT].view(np.uint8).reshape(-1).view(dtype)})
        with open_checkpoint(written.folder) as checkpoint:
            np.testing.assert_array_equal(
                checkpoint.weight(WEIGHT).dequantize(), written.twin.tensors[WEIGHT]
            )


def text(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [
        (STATE, text(b"{"), "q_proj.weight.quant_state.bitsandbytes__nf4' is no valid JSON"),
        (STATE, text(b"[1]"), "holds no JSON object"),
        (STATE, text(b"[" * 60_000), "nested too deeply"),
        (STATE, text(b" " * 70_000), "has more than 65536 bytes"),
        (STATE, text(b"{}"), "lacks shape"),
        (STATE, state("nf4", (128, 64), 63, **SAID), "blocksize = 63, expected a power of two"),
        (STATE, state("nf4", (128, 64), 1 << 30, **SAID), "blocksize = 1073741824"),
        (STATE, state("nf4", (128, 64), True, **SAID), "blocksize = True"),
        (STATE, state("nf4", (128, 64), 128, **SAID), r"absmax' has shape \[128\]"),
        (STATE, state("nf4", (128, 66), 64, **SAID), "no pairs of codes of"),
        (STATE, state("nf4", (1 << 31, 1 << 31), 64, **SAID), "no pairs of codes of"),
        (STATE, state("nf4", (1 << 40, 64), 64, **SAID), "shape = a list of 2"),
        (STATE, state("nf4", (-128, -64), 64, **SAID), "shape = a list of 2"),
        (STATE, state("nf4", (8192,), 64, **SAID), "shape = a list of 1, expected 2 or 3"),
        (STATE, state("nf4", (0, 64), 64, **SAID), "shape = a list of 2, expected 2 or 3"),
        (STATE, state("nf4", (512, 16), 64, **{**SAID, "nested_blocksize": 16}), "nested_absmax'"),
        (STATE, state("nf4", (128, 64), 64, **{**SAID, "nested_offset": "x"}), "offset = 'x'"),
        (STATE, state("nf4", (128, 64), 64, **{**SAID, "nested_offset": float("inf")}), "= inf"),
        (STATE, state("nf4", (128, 64), 64), "lacks nested_blocksize"),
        (STATE, np.zeros(4, np.int32), "is I32, expected U8"),
        (f"{STATE}2", state("nf4", (128, 64), 64), "is of type 'nf42'; nf4 and fp4"),
        (STATE.replace("nf4", "fp4"), state("fp4", (128, 64), 64, **SAID), "in two ways"),
        (WEIGHT, None, f"lacks tensor '{WEIGHT}'"),
        (WEIGHT, np.zeros((8192, 1), np.uint8), "has 8192 bytes"),
        (WEIGHT, np.zeros((4096, 1), bool), "is BOOL, expected U8"),
        (f"{WEIGHT}.quant_map", None, "lacks tensor .*quant_map'"),
        (f"{WEIGHT}.quant_map", np.zeros(15, np.float32), r"quant_map' has shape \[15\]"),
        (f"{WEIGHT}.quant_map", np.full(16, np.nan, np.float32), "quant_map' holds numbers"),
        (f"{WEIGHT}.absmax", np.zeros(127, np.uint8), r"absmax' has shape \[127\]"),
        (f"{WEIGHT}.absmax", np.zeros(128, np.float32), "absmax' is F32, expected U8"),
        (f"{WEIGHT}.nested_absmax", None, "absmax' is U8, expected F16"),
        (f"{WEIGHT}.nested_absmax", np.zeros(2, np.float32), r"nested_absmax' has shape \[2\]"),
        (f"{WEIGHT}.nested_absmax", np.full(1, np.inf, np.float32), "nested_absmax' holds"),
        (f"{WEIGHT}.nested_quant_map", None, "lacks tensor .*nested_quant_map'"),
        (f"{WEIGHT}.nested_quant_map", np.full(256, -np.inf, np.float32), "nested_quant_map' ho"),
        (f"{NAME}.SCB", np.ones(128, np.float32), "q_proj.weight' is U8, expected I8|two ways"),
    ],
)  # fmt: skip
def test_damaged_four_bits(made: Make, refused: Refused, name: str, array: Any, match: str) -> None:
    written = made(NESTED)
    written.rewrite({name: array})
    refused(written.folder, match)


@pytest.mark.parametrize(
    ("part", "array", "match"),
    [
        ("SCB", np.ones(127, np.float32), r"SCB' has shape \[127\]"),
        ("SCB", np.full(128, np.nan, np.float32), "SCB' holds numbers"),
        ("SCB", np.ones(128, np.int32), "SCB' is I32"),
        ("weight", None, f"lacks tensor '{WEIGHT}'"),
        ("weight", np.zeros((128, 64), np.uint8), "weight' is U8, expected I8"),
        ("weight", np.zeros((128, 0), np.int8), r"has shape \[128, 0\]"),
        ("weight_format", np.array(2, np.uint8), "names a layout for one kind of GPU"),
        ("weight_format", np.zeros(1, np.uint8), r"weight_format' has shape \[1\]"),
    ],
)
def test_damaged_eight_bits(
    made: Make, refused: Refused, part: str, array: Any, match: str
) -> None:
    written = made(EIGHT)
    written.rewrite({f"{NAME}.{part}": array})
    refused(written.folder, match)


def test_rows_that_cross_blocks_anyhow(made: Make, refused: Refused) -> None:
    written = made(PLAIN)
    said = {STATE: state("nf4", (64, 24), 64), WEIGHT: np.zeros((768, 1), np.uint8)}
    written.rewrite(said)
    refused(written.folder, "has rows of 24, which cross its blocks of 64")


def test_what_is_not_of_bitsandbytes(made: Make, refused: Refused) -> None:
    written = made(PLAIN)
    refused(written.folder, "has 'bitsandbytes', which is not gptq", quantization="gptq")
    written.twin.write(written.folder)
    refused(written.folder, "neither a tensor NAME.SCB nor", quantization="bitsandbytes")
