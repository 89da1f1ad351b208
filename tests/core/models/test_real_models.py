"""The two real models on the reference device, against a float32 forward of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import Device
from polysilicon.models.loading import load_model
from polysilicon.weights.checkpoint import open_checkpoint

from .conftest import Array, Logits, WriteSafetensors

FIXTURES = Path(__file__).parents[2] / "fixtures"
BOUND = 0.005
Real = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(params=["SmolLM2-135M-Instruct.Q4_1", "gemma-3-270m-q4_k_m"])
def real(request: pytest.FixtureRequest) -> Real:
    """The model's file, and what was computed for it elsewhere."""
    fixture = "smollm2_path" if request.param.startswith("SmolLM2") else "gemma3_path"
    document = json.loads((FIXTURES / f"logits-{request.param}.json").read_text())
    return request.getfixturevalue(fixture), document["cases"]


def log_softmax(logits: Array) -> Array:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_log_probabilities(real: Real, device: Device, logits: Logits) -> None:
    path, cases = real
    with open_checkpoint(path) as checkpoint:
        model = load_model(checkpoint, device)
    assert model.notes == ()
    prompt, last = [], []
    for case in cases:
        tokens = case["ids"]
        computed = log_softmax(logits(model, tokens))
        prompt += list(
            computed[np.arange(len(tokens) - 1), tokens[1:]] - np.array(case["prompt_logprobs"])
        )
        ids, expected = zip(*case["last_top"], strict=True)
        last += list(computed[-1, list(ids)] - np.array(expected))
        assert int(computed[-1].argmax()) == case["greedy"][0]
    assert len(last) == 20 * len(cases)
    assert np.abs(prompt).mean() <= BOUND
    assert np.abs(last).mean() <= BOUND


def test_smollm2_from_safetensors_equals_its_gguf(
    smollm2_path: Path, write_safetensors: WriteSafetensors, device: Device, logits: Logits
) -> None:
    """The same weights, dequantised to float32, under Hugging Face's names."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
    }
    modules = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for layer in range(30):
        for ours, theirs in modules.items():
            names[f"blk.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    tokens = [504, 3575, 282, 4649, 314]
    with open_checkpoint(smollm2_path) as checkpoint:
        assert set(checkpoint.tensors) == set(names)
        weights = {theirs: checkpoint.weight(ours).dequantize() for ours, theirs in names.items()}
        from_gguf = load_model(checkpoint, device)
        expected = logits(from_gguf, tokens)
    del from_gguf
    folder = write_safetensors(config, weights)
    del weights
    with open_checkpoint(folder) as checkpoint:
        from_safetensors = load_model(checkpoint, device)
        computed = logits(from_safetensors, tokens)
    (folder / "model.safetensors").unlink()
    assert np.abs(computed - expected).max() <= 1e-5 * np.abs(expected).max()
