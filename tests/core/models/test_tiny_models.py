"""Tiny models of every family against transformers, in float32, from safetensors and from GGUF."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from polysilicon.backend import Device
from polysilicon.models.loading import load_model
from polysilicon.weights.checkpoint import open_checkpoint

from .conftest import Array, Logits, Tiny, WriteGGUF, WriteSafetensors

NAMES = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "fixtures" / "models").glob("*.json")
    if path.stem not in ("greedy", "rope")
)
TOLERANCE = 1e-4


def assert_close(computed: Array, expected: Array) -> None:
    assert computed.shape == expected.shape
    assert np.abs(computed - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spelling", ["config", "legacy"])
def test_safetensors_equal_transformers(
    name: str,
    spelling: str,
    tiny: Tiny,
    write_safetensors: WriteSafetensors,
    device: Device,
    logits: Logits,
) -> None:
    model = tiny(name)
    folder = write_safetensors(getattr(model, spelling), model.weights)
    with open_checkpoint(folder) as checkpoint:
        loaded = load_model(checkpoint, device, max_length=len(model.tokens))
        assert_close(logits(loaded, model.tokens), model.expected)


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-sliding", "gemma3"])
def test_chunks_and_small_pages_change_nothing(
    name: str, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    model = tiny(name)
    with open_checkpoint(write_safetensors(model.config, model.weights)) as checkpoint:
        loaded = load_model(checkpoint, device)
    assert_close(logits(loaded, model.tokens, chunks=[1] * 40, page_size=3), model.expected)
    assert_close(logits(loaded, model.tokens, chunks=[7, 1, 30, 2]), model.expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_weights_are_read_exactly(
    name: str, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    model = tiny(name)
    weights = {key: value.astype(ml_dtypes.bfloat16) for key, value in model.weights.items()}
    with open_checkpoint(write_safetensors(model.config, weights)) as checkpoint:
        loaded = load_model(checkpoint, device)
    assert_close(logits(loaded, model.tokens), model.expected)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_gemma3(
    prefix: str, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    model = tiny("gemma3")
    text = {key: value for key, value in model.config.items() if key != "architectures"}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    weights = {prefix + key.removeprefix("model."): value for key, value in model.weights.items()}
    weights["vision_tower.patch_embedding.weight"] = np.ones((2, 2), np.float32)
    with open_checkpoint(write_safetensors(config, weights)) as checkpoint:
        loaded = load_model(checkpoint, device)
    assert_close(logits(loaded, model.tokens), model.expected)


def test_dynamic_scaling_is_settled_by_max_length(
    tiny: Tiny, write_safetensors: WriteSafetensors, device: Device
) -> None:
    model = tiny("llama-dynamic")
    with open_checkpoint(write_safetensors(model.config, model.weights)) as checkpoint:
        unscaled = load_model(checkpoint, device)
        scaled = load_model(checkpoint, device, max_length=40)
    assert unscaled.config.max_length == 16
    assert unscaled.config.ropes[0].frequencies == pytest.approx([1, 0.1, 0.01, 0.001])
    assert scaled.config.ropes[0].frequencies[-1] < 0.9 * unscaled.config.ropes[0].frequencies[-1]
    assert unscaled.notes == ()
    assert "trained for 16" in scaled.notes[0]


# GGUF has no dynamic NTK scaling, no window for Qwen, no attention scale or absent caps for Gemma,
# and no dense layers among those with experts.
NOT_IN_GGUF = {
    "llama-dynamic",
    "qwen2-sliding",
    "gemma2-uncapped",
    "qwen2moe-dense",
    "qwen2moe-sliding",
    "qwen3moe-dense",
    "qwen3moe-sliding",
    "glm",
}


@pytest.mark.parametrize("name", sorted(set(NAMES) - NOT_IN_GGUF))
def test_gguf_equals_transformers(
    name: str, tiny: Tiny, write_gguf: WriteGGUF, device: Device, logits: Logits
) -> None:
    model = tiny(name)
    with open_checkpoint(write_gguf(model)) as checkpoint:
        loaded = load_model(checkpoint, device, max_length=len(model.tokens))
        assert_close(logits(loaded, model.tokens), model.expected)
