"""What is particular to single families: their KV, adapters, and other layouts of their tensors."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from polysilicon.backend import AdapterSpec, Device
from polysilicon.models.loading import load_model, read_config
from polysilicon.models.model import Model
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import E8M0, FLOAT_TABLES

from .conftest import Array, Logits, Tiny, WriteGGUF, WriteSafetensors
from .gguf_twins import stacked

Load = Callable[[str], Model]
TOLERANCE = 1e-4


@pytest.fixture
def load(tiny: Tiny, write_safetensors: WriteSafetensors, device: Device) -> Load:
    def load_tiny(name: str) -> Model:
        model = tiny(name)
        with open_checkpoint(write_safetensors(model.config, model.weights)) as checkpoint:
            return load_model(checkpoint, device)

    return load_tiny


def assert_close(computed: Array, expected: Array, tolerance: float = TOLERANCE) -> None:
    assert computed.shape == expected.shape
    assert np.abs(computed - expected).max() <= tolerance * np.abs(expected).max()


def test_latent_attention_keeps_one_narrow_head(load: Load) -> None:
    (spec,) = load("deepseek3").kv_specs(16, "f16")
    planes = [(plane.name, plane.heads, plane.dim) for plane in spec.planes]
    assert planes == [("k", 1, 4 + 12), ("v", 1, 12)]


@pytest.mark.parametrize(
    ("name", "module", "layers"),
    [("gpt-oss", "", 2), ("phi3", "qkv_proj.", 3), ("deepseek3", "", 0)],
)
def test_calibrated_scales_of_kv(
    tiny: Tiny,
    write_safetensors: WriteSafetensors,
    device: Device,
    name: str,
    module: str,
    layers: int,
) -> None:
    """Of layers that keep keys and values: latents are neither."""
    model = tiny(name)
    attention = [f"model.layers.{i}.self_attn" for i in range(model.config["num_hidden_layers"])]
    scales = {
        f"{at}.{module}{part}_scale": np.ones(1, np.float32) for at in attention for part in "kv"
    }
    scheme = {"type": "float", "num_bits": 8}
    settings = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    config = {**model.config, "quantization_config": settings}
    with open_checkpoint(write_safetensors(config, {**model.weights, **scales})) as checkpoint:
        notes = load_model(checkpoint, device, kv_dtype="fp8_e4m3").notes
    told = [note for note in notes if "scales" in note]
    assert told == [f"KV of {layers} layers has the scales that the checkpoint brings."][:layers]


def test_windows_alternate_in_gpt_oss(load: Load) -> None:
    specs = load("gpt-oss").kv_specs(16, "f16")
    assert [(spec.window, spec.layers) for spec in specs] == [(None, (1,)), (8, (0,))]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mixtral", {"qkv": (32, 16, 16), "o": (32,)}),
        ("phi3", {"qkv": (32, 16, 16), "o": (32,), "gate_up": (48, 48), "down": (32,)}),
        ("qwen2moe", {"qkv": (32, 16, 16), "o": (32,)}),
        ("deepseek2", {"shared_gate_up": (32, 32), "shared_down": (32,)}),
    ],
)
def test_adapters_apply_to_products_of_every_token(
    name: str, expected: dict[str, tuple[int, ...]], load: Load
) -> None:
    """Not to those of experts that are chosen, nor to DeepSeek's merged projections."""
    targets = load(name).adapter_targets()
    last = {
        target.removeprefix("layers.1."): shape.outputs
        for target, shape in targets.items()
        if target.startswith("layers.1.")
    }
    assert last == expected


def test_an_adapter_changes_a_shared_expert(
    load: Load, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    model, random = tiny("deepseek2"), np.random.default_rng(5)
    plain = load("deepseek2")
    pool = device.adapter_pool(AdapterSpec(max_rank=2, targets=plain.adapter_targets()), 2)
    down, up = (random.normal(size=shape).astype(np.float32) / 4 for shape in ((2, 32), (32, 2)))
    pool.write(1, {"layers.1.shared_down": [(down, up)]})
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    merged = {**model.weights, name: model.weights[name] + up @ down}
    with open_checkpoint(write_safetensors(model.config, merged)) as checkpoint:
        expected = logits(load_model(checkpoint, device), model.tokens)
    assert_close(logits(plain, model.tokens, adapters=pool, adapter_slot=1), expected)
    assert_close(logits(plain, model.tokens, adapters=pool, adapter_slot=0), model.expected)
    assert np.abs(expected - model.expected).max() > 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["phi3", "mixtral", "gpt-oss", "qwen2moe", "deepseek3"])
def test_progress_counts_each_tensor_once(
    name: str, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device
) -> None:
    model, calls = tiny(name), []
    with open_checkpoint(write_safetensors(model.config, model.weights)) as checkpoint:
        load_model(checkpoint, device, progress=lambda *counts: calls.append(counts))
    size = sum(value.nbytes for value in model.weights.values())
    assert calls[0] == (0, size)
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "phi3", "glm4", "stablelm"])
def test_bfloat16_weights_are_read_exactly(
    name: str, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    model = tiny(name)
    weights = {key: value.astype(ml_dtypes.bfloat16) for key, value in model.weights.items()}
    with open_checkpoint(write_safetensors(model.config, weights)) as checkpoint:
        assert_close(logits(load_model(checkpoint, device), model.tokens), model.expected)


def test_projections_merged_from_bfloat16_are_rounded_to_half_precision(
    tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    model = tiny("deepseek3")
    weights = {key: value.astype(ml_dtypes.bfloat16) for key, value in model.weights.items()}
    with open_checkpoint(write_safetensors(model.config, weights)) as checkpoint:
        computed = logits(load_model(checkpoint, device), model.tokens)
    assert_close(computed, model.expected, 5e-3)
    assert np.abs(computed - model.expected).max() > 1e-5


def test_experts_of_gpt_oss_in_mxfp4(
    tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    """The blocks that OpenAI publishes give what their values do, stored plain."""
    model, random = tiny("gpt-oss"), np.random.default_rng(11)
    plain, quantised = dict(model.weights), dict[str, Array](model.weights)
    for key in model.weights:
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = model.weights[key].shape
        codes = random.integers(0, 16, (experts, outputs, inputs), np.uint8)
        exponents = random.integers(124, 127, (experts, outputs, inputs // 32), np.uint8)
        scale = np.repeat(E8M0[exponents].astype(np.float32), 32, axis=-1)
        values = FLOAT_TABLES["f4_e2m1"][codes] * scale
        plain[key] = np.ascontiguousarray(values.swapaxes(1, 2))
        del quantised[key]
        pairs = codes.reshape(experts, outputs, inputs // 32, 16, 2)
        quantised[f"{key}_blocks"] = pairs[..., 0] | pairs[..., 1] << np.uint8(4)
        quantised[f"{key}_scales"] = exponents
    config = {**model.config, "quantization_config": {"quant_method": "mxfp4"}}
    with open_checkpoint(write_safetensors(model.config, plain)) as checkpoint:
        expected = logits(load_model(checkpoint, device), model.tokens)
    with open_checkpoint(write_safetensors(config, quantised)) as checkpoint:
        computed = logits(load_model(checkpoint, device), model.tokens)
    assert_close(computed, expected)
    assert np.abs(expected - model.expected).max() > 0.1 * np.abs(expected).max()


def test_older_gguf_files_of_deepseek(
    tiny: Tiny, write_gguf: WriteGGUF, device: Device, logits: Logits
) -> None:
    """They have latents' second projection as one tensor, and heads' own widths."""
    model = tiny("deepseek3")
    added = {
        f"blk.{layer}.attn_kv_b.weight": model.weights[
            f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        ]
        for layer in range(2)
    }
    changes = {
        "attention.head_count_kv": 4,
        "attention.key_length": 6 + 4,
        "attention.value_length": 5,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    path = write_gguf(model, changes, added, ("attn_k_b", "attn_v_b"))
    with open_checkpoint(path) as checkpoint:
        assert_close(logits(load_model(checkpoint, device), model.tokens), model.expected)


def test_layers_behind_the_models_own_are_left_alone(
    tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    """DeepSeek-V3 is published with a layer more, which predicts a token ahead."""
    model = tiny("deepseek3")
    extra = {
        key.replace("layers.1.", "layers.2."): values
        for key, values in model.weights.items()
        if key.startswith("model.layers.1.")
    }
    with open_checkpoint(write_safetensors(model.config, model.weights | extra)) as checkpoint:
        assert_close(logits(load_model(checkpoint, device), model.tokens), model.expected)


def test_early_gguf_files_of_qwen2_moe(tiny: Tiny, write_gguf: WriteGGUF) -> None:
    changes = {
        "feed_forward_length": 48,
        "expert_feed_forward_length": None,
        "expert_shared_feed_forward_length": None,
    }
    with open_checkpoint(write_gguf(tiny("qwen2moe"), changes)) as checkpoint:
        experts = read_config(checkpoint)[1].experts
    assert experts is not None
    assert (experts.size, experts.shared_size) == (24, 48)


def test_llama_cpps_converter_may_drop_the_axis_of_a_single_row(
    tiny: Tiny, write_gguf: WriteGGUF, device: Device, logits: Logits
) -> None:
    model = tiny("qwen2moe")
    added = {
        f"blk.{layer}.ffn_gate_inp_shexp.weight": model.weights[
            f"model.layers.{layer}.mlp.shared_expert_gate.weight"
        ][0]
        for layer in range(2)
    }
    with open_checkpoint(write_gguf(model, {}, added, ("ffn_gate_inp_shexp",))) as checkpoint:
        assert checkpoint.tensors["blk.0.ffn_gate_inp_shexp.weight"].shape == (32,)
        assert_close(logits(load_model(checkpoint, device), model.tokens), model.expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "qwen3moe-dense", "deepseek3", "gpt-oss"])
def test_experts_as_mlx_saves_them(
    name: str, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    """As stacks, gate and up apart, outputs first."""
    model = tiny(name)
    weights: dict[str, Array] = {}
    for key, values in stacked(model.weights).items():
        match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)", key)
        if match is None:
            weights[key] = values
            continue
        block = {"mixtral": "block_sparse_moe.switch_mlp", "gpt-oss": "mlp.experts"}.get(
            name, "mlp.switch_mlp"
        )
        weights[f"model.layers.{match[1]}.{block}.{match[2]}_proj.{match[3]}"] = values
    with open_checkpoint(write_safetensors(model.config, weights)) as checkpoint:
        assert_close(logits(load_model(checkpoint, device), model.tokens), model.expected)
