"""Experts that are stored one by one, as stacks: exactly, or near to it where no stack can be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from polysilicon.backend import Device
from polysilicon.models.loading import load_model
from polysilicon.models.stacking import stack_experts
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import Dense, GroupAffine, Weight, pack_codes

from .conftest import Array, Logits

ROWS, COLUMNS, GROUP = 6, 96, 16


def affine(seed: int, **changes: Any) -> GroupAffine:
    random = np.random.default_rng(seed)
    groups = (ROWS, COLUMNS // GROUP)
    weight = GroupAffine(
        shape=(ROWS, COLUMNS),
        bits=4,
        group=GROUP,
        codes=pack_codes(random.integers(0, 16, (ROWS, COLUMNS), np.uint8), 4),
        scale=np.exp(random.normal(size=groups) * 0.2).astype(np.float16),
        bias=random.integers(-15, 1, groups).astype(np.float32),
    )
    return dataclasses.replace(weight, **changes)


def order(seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).permutation(COLUMNS).astype(np.int32)


def values(weights: list[Weight]) -> Array:
    return np.stack([weight.dequantize() for weight in weights])


def test_zero_points_that_are_stored_otherwise_are_brought_into_one_form() -> None:
    weights: list[Weight] = [affine(0), affine(1, bias=None, offset=8), affine(2, offset=7)]
    stack = stack_experts(weights)
    assert stack.encoding == "affine:4/16"
    np.testing.assert_array_equal(stack.dequantize(), values(weights))


def test_orders_of_inputs_that_differ_take_eight_bits() -> None:
    weights: list[Weight] = [affine(seed, input_order=order(seed)) for seed in range(3)]
    expected = values(weights)
    stack = stack_experts(weights)
    assert stack.encoding == "affine:8/32"
    error = np.abs(stack.dequantize() - expected).reshape(3, ROWS, -1, 32)
    step = np.abs(expected).reshape(error.shape).max(axis=-1, keepdims=True) / 127
    # Half a step, and what rounding the scale to f16 does to the largest code.
    assert (error <= step * (0.5 + 127 * 2.0**-11)).all()
    # Beside the uniform error of the rounding to 4 bits, a step in 12 squared.
    rounding = np.mean([np.square(w.scale.astype(np.float32)).mean() / 12 for w in weights])
    assert np.square(error).mean() < 0.03 * rounding
    one = stack_experts([weights[0], weights[0]])
    assert one.encoding == "affine:4/16"
    np.testing.assert_array_equal(one.dequantize(), expected[[0, 0]])


@pytest.mark.parametrize(
    ("weights", "encoding", "tolerance"),
    [
        ([affine(0, bits=8, codes=affine(0).codes.repeat(2, axis=1)), affine(1)], "f16", 2**-11),
        (
            [affine(0), Dense(array=np.full((ROWS, COLUMNS), 0.3, ml_dtypes.bfloat16))],
            "f16",
            2**-11,
        ),
        ([affine(0), Dense(array=np.full((ROWS, COLUMNS), 0.3, np.float32))], "f32", 0.0),
        (
            [affine(0), Dense(array=np.full((ROWS, COLUMNS), 1e6, ml_dtypes.bfloat16))],
            "bf16",
            2**-8,
        ),
    ],
)
def test_matrices_of_no_common_form_become_dense(
    weights: list[Weight], encoding: str, tolerance: float
) -> None:
    stack = stack_experts(weights)
    assert stack.encoding == f"dense:{encoding}"
    np.testing.assert_allclose(stack.dequantize(), values(weights), rtol=tolerance, atol=0)


MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


def act_order(
    random: np.random.Generator, rows: int, columns: int
) -> tuple[dict[str, Array], Array]:
    """A linear of GPTQ with groups of 32 in an order of its own, and its values `[N, K]`."""
    codes = random.integers(0, 16, (rows, columns), np.uint32)
    groups = random.permutation(columns) // 32
    scale = (np.exp(random.normal(size=(columns // 32, rows)) * 0.2) / 40).astype(np.float16)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = np.bitwise_or.reduce(codes.T.reshape(-1, 8, rows) << shifts[:, None], axis=1)
    stored = {
        "qweight": np.ascontiguousarray(words).view(np.int32),
        "qzeros": np.full((columns // 32, rows // 8), 0x77777777, np.int32),
        "scales": scale,
        "g_idx": groups.astype(np.int32),
    }
    values = (codes.astype(np.float32) - 8) * scale.astype(np.float32)[groups].T
    return stored, values


def test_experts_in_act_order(tmp_path: Path, device: Device, logits: Logits) -> None:
    """The inputs of `down` come in each expert's order, exactly; those of gate and up cannot."""
    random = np.random.default_rng(3)
    plain, quantised = dict[str, Array](), dict[str, Array]()

    def add(name: str, *shape: int) -> None:
        plain[name] = quantised[name] = (random.normal(size=shape) / 4).astype(np.float32)

    for name, *shape in (
        ("model.embed_tokens", 40, 64),
        ("lm_head", 40, 64),
        ("model.norm", 64),
        ("model.layers.0.input_layernorm", 64),
        ("model.layers.0.post_attention_layernorm", 64),
        ("model.layers.0.self_attn.q_proj", 64, 64),
        ("model.layers.0.self_attn.k_proj", 32, 64),
        ("model.layers.0.self_attn.v_proj", 32, 64),
        ("model.layers.0.self_attn.o_proj", 64, 64),
        ("model.layers.0.block_sparse_moe.gate", 3, 64),
    ):
        add(f"{name}.weight", *shape)
    for expert in range(3):
        for part, rows, columns in (("w1", 128, 64), ("w2", 64, 128), ("w3", 128, 64)):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{part}"
            stored, plain[f"{name}.weight"] = act_order(random, rows, columns)
            quantised |= {f"{name}.{end}": array for end, array in stored.items()}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    results = []
    for folder, config, tensors in (
        ("plain", MIXTRAL, plain),
        ("gptq", {**MIXTRAL, "quantization_config": settings}, quantised),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, tmp_path / folder / "model.safetensors")
        with open_checkpoint(tmp_path / folder) as checkpoint:
            model = load_model(checkpoint, device)
            results.append(logits(model, list(range(40))))
    expected, computed = results
    assert model.notes == (
        "2 stacks of experts of affine:4/32 are held as affine:8/32, as experts differ in the "
        "order of their inputs (act-order) or in their encoding.",
    )
    assert np.abs(computed - expected).max() < 0.02 * np.abs(expected).max()
    assert np.abs(computed - expected).max() > 0
