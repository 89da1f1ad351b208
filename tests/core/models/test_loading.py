"""What loading decides: KV groups, adapters, transcoding, progress, families that plugins add."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polysilicon.backend import AdapterSpec, Capabilities, Device
from polysilicon.errors import ModelError
from polysilicon.models.config import kv_groups
from polysilicon.models.loading import load_model, read_config
from polysilicon.models.model import Model
from polysilicon.models.registry import architectures
from polysilicon.models.transcoding import transcode, transcode_vector
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import (
    Dense,
    GroupAffine,
    GroupFloat,
    SuperScaled,
    Weight,
    pack_codes,
)

from .conftest import (
    ComputeOutputs,
    Logits,
    Tiny,
    WriteGGUF,
    WriteSafetensors,
)

Load = Callable[..., Model]


@pytest.fixture
def load(tiny: Tiny, write_safetensors: WriteSafetensors, device: Device) -> Load:
    def load_tiny(name: str, **options: Any) -> Model:
        model = tiny(name)
        with open_checkpoint(write_safetensors(model.config, model.weights)) as checkpoint:
            return load_model(checkpoint, device, **options)

    return load_tiny


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("llama", [("full", None, (0, 1, 2))]),
        ("mistral", [("sliding-8", 8, (0, 1, 2))]),
        ("qwen2-sliding", [("full", None, (0,)), ("sliding-8", 8, (1, 2))]),
        ("gemma2", [("full", None, (1, 3)), ("sliding-8", 8, (0, 2))]),
        ("gemma3", [("full", None, (5,)), ("sliding-8", 8, (0, 1, 2, 3, 4, 6))]),
    ],
)
def test_kv_groups(
    name: str, groups: list[tuple[str, int | None, tuple[int, ...]]], load: Load
) -> None:
    specs = load(name).kv_specs(32, "f16")
    assert [(spec.name, spec.window, spec.layers) for spec in specs] == groups
    assert [spec.group for spec in specs] == list(range(len(groups)))
    for spec in specs:
        assert spec.page_size == 32
        assert [(plane.name, plane.dtype) for plane in spec.planes] == [("k", "f16"), ("v", "f16")]
        assert {(plane.heads, plane.dim) for plane in spec.planes} == {
            (2, 12 if name.startswith("gemma") else 8)
        }


def test_several_windows_are_groups_of_their_own(load: Load) -> None:
    config = dataclasses.replace(load("llama").config, windows=(4, None, 8))
    specs = kv_groups(config, 16, "bf16")
    assert [(spec.window, spec.layers) for spec in specs] == [(None, (1,)), (8, (2,)), (4, (0,))]


def test_adapter_targets_name_every_linear(load: Load) -> None:
    targets = load("llama-tied-head-dim").adapter_targets()
    assert len(targets) == 4 * 3
    assert (targets["layers.2.qkv"].inputs, targets["layers.2.qkv"].outputs) == (32, (48, 24, 24))
    assert (targets["layers.0.o"].inputs, targets["layers.0.o"].outputs) == (48, (32,))
    assert (targets["layers.1.gate_up"].inputs, targets["layers.1.gate_up"].outputs) == (
        32,
        (48, 48),
    )
    assert (targets["layers.1.down"].inputs, targets["layers.1.down"].outputs) == (48, (32,))


def test_adapters_change_the_weights_they_name(
    load: Load, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    """A LoRA on every target equals a model whose weights have it merged in."""
    model, random = tiny("llama"), np.random.default_rng(5)
    plain = load("llama")
    pool = device.adapter_pool(AdapterSpec(max_rank=2, targets=plain.adapter_targets()), 2)
    places = {
        "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    merged, adapter = dict(model.weights), {}
    for target, shape in plain.adapter_targets().items():
        _, layer, name = target.split(".")
        pairs = []
        for outputs, module in zip(shape.outputs, places[name], strict=True):
            a = random.normal(size=(2, shape.inputs)).astype(np.float32) / 8
            b = random.normal(size=(outputs, 2)).astype(np.float32) / 8
            pairs.append((a, b))
            merged[f"model.layers.{layer}.{module}.weight"] = (
                merged[f"model.layers.{layer}.{module}.weight"] + b @ a
            )
        adapter[target] = pairs
    pool.write(1, adapter)
    with open_checkpoint(write_safetensors(model.config, merged)) as checkpoint:
        expected = logits(load_model(checkpoint, device), model.tokens)
    computed = logits(plain, model.tokens, adapters=pool, adapter_slot=1)
    unchanged = logits(plain, model.tokens, adapters=pool, adapter_slot=0)
    scale = np.abs(expected).max()
    assert np.abs(computed - expected).max() <= 1e-4 * scale
    assert np.abs(unchanged - model.expected).max() <= 1e-4 * scale
    assert np.abs(unchanged - expected).max() > 0.1 * scale


def test_hidden_states_are_the_residual_stream_after_each_layer(
    load: Load, tiny: Tiny, outputs: ComputeOutputs
) -> None:
    """The last one, normed and projected, is the logits."""
    model = tiny("llama")
    hidden = outputs(load("llama"), model.tokens, (0, 2)).hidden
    assert set(hidden) == {0, 2}
    last = hidden[2]
    assert last.shape == (40, 32)
    normed = last / np.sqrt((last.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    computed = normed * model.weights["model.norm.weight"] @ model.weights["lm_head.weight"].T
    assert np.abs(computed - model.expected).max() <= 1e-4 * np.abs(model.expected).max()


def test_progress_ends_at_the_checkpoints_size(tiny: Tiny, load: Load) -> None:
    calls = []
    model = load("llama", progress=lambda done, total: calls.append((done, total)))
    size = sum(value.nbytes for value in tiny("llama").weights.values())
    assert calls[0] == (0, size)
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert model.nbytes == size


def test_a_tied_head_shares_the_embedding(load: Load, tiny: Tiny) -> None:
    model = load("llama-tied-head-dim")
    assert model.nbytes == sum(
        value.nbytes for value in tiny("llama-tied-head-dim").weights.values()
    )


def capabilities(*encodings: str) -> Capabilities:
    return Capabilities(compute="f32", kv_dtypes=("f16",), page_sizes=(16,), encodings=encodings)


def affine(scale: float) -> GroupAffine:
    codes = np.random.default_rng(0).integers(0, 16, (4, 32)).astype(np.uint8)
    return GroupAffine(
        shape=(4, 32),
        bits=4,
        group=16,
        codes=pack_codes(codes, 4),
        scale=np.full((4, 2), scale, np.float32),
        offset=8,
    )


def codebook(table: list[float], scale: float, dtype: type = np.float16) -> GroupFloat:
    bits = (len(table) - 1).bit_length()
    codes = np.random.default_rng(1).integers(0, len(table), (4, 32)).astype(np.uint8)
    supers = np.full((4, 1), scale, dtype)
    return GroupFloat(
        shape=(4, 32),
        format="codebook",
        group=16,
        codes=pack_codes(codes, bits),
        scale=SuperScaled(
            codes=pack_codes(np.full((4, 2), 5, np.uint8), 4),
            bits=4,
            offset=1,
            count=2,
            scale=supers,
            group=2,
        ),
        table=np.array(table, np.float32),
    )


IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
IQ2 = [1, 3.125, 5.375, 0, -1, -3.125, -5.375, 0]


@pytest.mark.parametrize(
    ("weight", "encodings", "target"),
    [
        (codebook(IQ4, 0.01), ("dense:*", "affine:*"), "affine:8/16"),
        (codebook(IQ2, 0.01), ("dense:*", "affine:*"), "affine:7/16"),
        (codebook(IQ2, 0.01), ("dense:*", "affine:7/16"), "affine:7/16"),
        (codebook(IQ2, 2.0**-24), ("dense:*", "affine:*"), "affine:7/16"),
        (codebook(IQ2, 0.01), ("dense:*", "affine:4/*"), "dense:f16"),
        (codebook(IQ2, 0.01), ("float:*",), "float:codebook/16"),
        (codebook([3, 5, 7, 11], 0.01), ("affine:*",), "affine:4/16"),
        (codebook([0.0] * 16, 1, np.float32), ("affine:*",), "affine:2/16"),
        (codebook([-128, 1, 0, 128], 1), ("affine:*", "dense:*"), "dense:f16"),
        (codebook([0.1, 1, 2, 3], 1), ("affine:*", "dense:*"), "dense:f16"),
        (affine(0.1), ("affine:4/16", "dense:*"), "affine:4/16"),
        (affine(0.1), ("affine:*",), "affine:4/16"),
        (affine(0.1), ("dense:*",), "dense:f16"),
        (affine(0.5), ("dense:*",), "dense:f16"),
        (affine(0.1), ("dense:f32", "dense:bf16"), "dense:bf16"),
        (affine(0.1), ("dense:f32",), "dense:f32"),
        (affine(2.0**100), ("dense:*",), "dense:bf16"),
        (affine(1e6), ("dense:f16", "dense:f32"), "dense:f32"),
        (Dense(array=np.float16([[1.0]])), ("dense:bf16", "dense:f32"), "dense:bf16"),
        (Dense(array=np.array([[2.0**-30]], ml_dtypes.bfloat16)), ("dense:f*",), "dense:f32"),
        (Dense(array=np.array([[3.5]], ml_dtypes.bfloat16)), ("dense:f*",), "dense:f16"),
    ],
)
def test_transcoding(weight: Weight, encodings: tuple[str, ...], target: str) -> None:
    device = capabilities(*encodings)
    result = transcode(weight, device)
    assert result.encoding == target
    assert any(fnmatch.fnmatchcase(target, pattern) for pattern in encodings)
    precision = {"dense:f16": 2.0**-11, "dense:bf16": 2.0**-8}.get(target, 0)
    expected = weight.dequantize()
    assert (np.abs(result.dequantize() - expected) <= precision * np.abs(expected)).all()


def test_vectors_stay_float32_where_they_can() -> None:
    values = np.float32([0.1, 1e-20])
    assert transcode_vector(values, capabilities("dense:*")).encoding == "dense:f32"
    assert transcode_vector(values, capabilities("dense:bf16")).encoding == "dense:bf16"


def test_a_device_that_takes_nothing_dense_is_refused() -> None:
    with pytest.raises(ModelError, match=r"affine:4/16.*backend"):
        transcode(affine(0.1), capabilities("affine:8/32"))


def test_notes_say_once_what_was_transcoded(
    tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    model = tiny("llama")
    device.capabilities = dataclasses.replace(device.capabilities, encodings=("dense:bf16",))
    with open_checkpoint(write_safetensors(model.config, model.weights)) as checkpoint:
        loaded = load_model(checkpoint, device)
    (note,) = loaded.notes
    assert "dense:f32" in note
    assert "dense:bf16" in note
    assert str(2 + 3 * 7) in note
    computed = logits(loaded, model.tokens)
    assert np.abs(computed - model.expected).max() <= 1e-4 * np.abs(model.expected).max()


def test_a_plugins_family_is_found_and_comes_first(
    tiny: Tiny, write_safetensors: WriteSafetensors, device: Device
) -> None:
    llama = next(family for family in architectures() if family.name == "llama")
    added = dataclasses.replace(llama, name="mine", hf_names=("MineForCausalLM",))
    replaced = dataclasses.replace(llama, name="better")
    model = tiny("llama")
    config = {**model.config, "architectures": ["MineForCausalLM"]}
    with open_checkpoint(write_safetensors(config, model.weights)) as checkpoint:
        assert read_config(checkpoint, added=[added])[0] is added
        with pytest.raises(ModelError, match="MineForCausalLM"):
            read_config(checkpoint)
    with open_checkpoint(write_safetensors(model.config, model.weights)) as checkpoint:
        assert read_config(checkpoint, added=[replaced])[0] is replaced


def test_names_of_families_are_unique() -> None:
    names = [family.name for family in architectures()]
    assert len(set(names)) == len(names)
    for attribute in ("hf_names", "hf_types", "gguf_names"):
        known = [name for family in architectures() for name in getattr(family, attribute)]
        assert len(set(known)) == len(known)


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("gemma2", 46, (4608 // 32) ** -0.5),
        ("gemma2", 26, 128**-0.5),
        ("gemma3", 62, (4608 // 32) ** -0.5),
        ("gemma3", 46, 128**-0.5),
    ],
)
def test_attention_scale_of_the_largest_gemmas_in_gguf(
    name: str, layers: int, expected: float, tiny: Tiny, write_gguf: WriteGGUF
) -> None:
    changes = {
        "block_count": layers,
        "embedding_length": 4608,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
        "attention.key_length": 128,
        "attention.value_length": 128,
    }
    with open_checkpoint(write_gguf(tiny(name), changes)) as checkpoint:
        config = read_config(checkpoint)[1]
    assert config.attention_scale == pytest.approx(expected)
    assert config.embedding_scale == pytest.approx(4608**0.5)


def test_gemma3_in_gguf_without_a_window_has_none(tiny: Tiny, write_gguf: WriteGGUF) -> None:
    with open_checkpoint(write_gguf(tiny("gemma3"), {"attention.sliding_window": 0})) as checkpoint:
        config = read_config(checkpoint)[1]
    assert set(config.windows) == {None}
    assert len(set(config.ropes)) == 1


def test_gguf_yarn_magnitude(tiny: Tiny, write_gguf: WriteGGUF) -> None:
    """llama.cpp's `attn_factor` multiplies YaRN's own; `yarn_attn_factor` stands for it."""
    own = 0.1 * np.log(4.0) + 1
    for changes, expected in (
        ({}, own),
        ({"rope.scaling.attn_factor": 0.5}, 0.5 * own),
        ({"rope.scaling.yarn_log_multiplier": 1.0}, 1.0),
        ({"rope.scaling.yarn_attn_factor": 1.5}, 1.5),
    ):
        with open_checkpoint(write_gguf(tiny("llama-yarn"), changes)) as checkpoint:
            config = read_config(checkpoint)[1]
        assert config.ropes[0].scale == pytest.approx(expected)
    assert config.max_position == 256
