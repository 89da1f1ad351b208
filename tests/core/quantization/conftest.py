"""Tiny checkpoints to quantise, and their logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polysilicon.backend import Batch
from polysilicon.models.loading import load_model
from polysilicon.reference.device import ReferenceDevice
from polysilicon.weights.checkpoint import Checkpoint

Float32 = npt.NDArray[np.float32]
WriteModel = Callable[..., Path]
Logits = Callable[..., Float32]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
GEMMA3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Float32]:
    """Random weights of a Llama-like model, with a few large input channels."""
    random = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    query, key = (config[f"num_{kind}_heads"] * width for kind in ("attention", "key_value"))
    gemma = config["model_type"].startswith("gemma")

    def matrix(rows: int, columns: int) -> Float32:
        return np.asarray(random.standard_normal((rows, columns)) / np.sqrt(columns), np.float32)

    def norm(size: int) -> Float32:
        values = np.exp(random.standard_normal(size) * 0.7)
        return np.asarray(values - gemma, np.float32)

    found = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 4}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key, hidden),
            ("self_attn.v_proj", key, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            found[f"{at}.{name}.weight"] = matrix(rows, columns)
            biased = config.get("mlp_bias" if "mlp" in name else "attention_bias")
            if biased:
                found[f"{at}.{name}.bias"] = matrix(1, rows)[0]
        norms = ["input_layernorm", "post_attention_layernorm"]
        if gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            for name in ("q_norm", "k_norm"):
                found[f"{at}.self_attn.{name}.weight"] = norm(width)
        for name in norms:
            found[f"{at}.{name}.weight"] = norm(hidden)
    found["model.norm.weight"] = norm(hidden)
    return found


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE as SmolLM has it: bytes, a few merges, two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: token for token, text in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("\u0120", "the"), ("e", "r")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    )


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Write a model directory and return its path: `write(config, seed=, dtype=, **changes)`."""

    def write(
        config: dict[str, Any], *, seed: int = 0, dtype: Any = np.float32, **changes: Any
    ) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        config = {**config, **changes}
        (folder / "config.json").write_text(json.dumps(config))
        weights = {k: v.astype(dtype) for k, v in tensors(config, seed).items()}
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        write_tokenizer(folder)
        return folder

    return write


@pytest.fixture
def logits() -> Logits:
    """Logits `[T, V]` of a checkpoint by the reference device."""

    def compute(
        checkpoint: Checkpoint, tokens: Sequence[int] = range(5, 45), **options: Any
    ) -> Float32:
        device = ReferenceDevice()
        model = load_model(checkpoint, device, **options)
        count = len(tokens)
        pages = -(-count // 16)
        specs = model.kv_specs(16, "f32")
        model.bind([device.kv_pool(spec, pages + 1) for spec in specs])
        positions = np.arange(count, dtype=np.int32)
        batch = Batch(
            tokens=np.array(tokens, np.int32),
            token_source=np.full(count, -1, np.int32),
            positions=positions,
            query_start=np.array([0, count], np.int32),
            context_len=np.array([count], np.int32),
            page_tables=(np.arange(1, pages + 1, dtype=np.int32)[None],) * len(specs),
            slots=(positions + np.int32(16),) * len(specs),
            logit_rows=positions,
            sequence_slot=np.zeros(1, np.int32),
            adapter_slot=np.zeros(1, np.int32),
        )
        result = device.compile(model.forward)(batch, None).result().logits
        device.close()
        return result

    return compute
