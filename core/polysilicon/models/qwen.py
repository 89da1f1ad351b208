"""Qwen2 and 2.5 (biases on q, k and v) and Qwen3 (norms on each head of q and k)."""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.config import ModelConfig
from polysilicon.models.llama import LLAMA
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

# transformers' Qwen2Config and Qwen3Config, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _read_hf(fields: Fields, name: str, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    config = hf_config.read_decoder(fields, name, max_length)
    if not fields.flag("use_sliding_window", default=False):
        return config
    first = fields.integer("max_window_layers", low=0)
    sliding = hf_config.sliding_layers(fields, [layer >= first for layer in range(config.layers)])
    return dataclasses.replace(config, windows=hf_config.windows(fields, sliding))


def _read_qwen2(fields: Fields, max_length: int | None) -> ModelConfig:
    return dataclasses.replace(_read_hf(fields, "qwen2", max_length), qkv_bias=True)


def _read_qwen3(fields: Fields, max_length: int | None) -> ModelConfig:
    bias = fields.flag("attention_bias", default=False)
    config = _read_hf(fields.with_defaults({"head_dim": 128}), "qwen3", max_length)
    return dataclasses.replace(config, qk_norm=True, qkv_bias=bias, o_bias=bias)


def _read_qwen2_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    return gguf_config.read_decoder(fields, checkpoint, "qwen2", max_length, activation="silu")


def _read_qwen3_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(fields, checkpoint, "qwen3", max_length, activation="silu")
    return dataclasses.replace(config, qk_norm=True)


QWEN2 = dataclasses.replace(
    LLAMA,
    name="qwen2",
    hf_names=("Qwen2ForCausalLM",),
    hf_types=("qwen2",),
    gguf_names=("qwen2",),
    read_hf=_read_qwen2,
    read_gguf=_read_qwen2_gguf,
)

QWEN3 = dataclasses.replace(
    LLAMA,
    name="qwen3",
    hf_names=("Qwen3ForCausalLM",),
    hf_types=("qwen3",),
    gguf_names=("qwen3",),
    read_hf=_read_qwen3,
    read_gguf=_read_qwen3_gguf,
)

ARCHITECTURES = (QWEN2, QWEN3)
