"""Phi-3, 3.5 and 4: Llama with fused projections, LongRoPE, and in Phi-4-mini partial rotation."""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.config import ModelConfig
from polysilicon.models.llama import GGUF_NAMES, HF_NAMES, LLAMA
from polysilicon.models.names import Fused, TensorNames
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

# transformers' Phi3Config, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}

_QKV = Fused(modules=("layers.q", "layers.k", "layers.v"))
_GATE_UP = Fused(modules=("layers.gate", "layers.up"))


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    config = hf_config.read_decoder(fields, "phi3", max_length)
    return dataclasses.replace(config, windows=hf_config.windows(fields, [True] * config.layers))


def _read_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(fields, checkpoint, "phi3", max_length, activation="silu")
    window = gguf_config.read_window(fields)
    return dataclasses.replace(config, windows=(window,) * config.layers)


PHI3 = dataclasses.replace(
    LLAMA,
    name="phi3",
    hf_names=("Phi3ForCausalLM",),
    hf_types=("phi3",),
    gguf_names=("phi3",),
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    hf_tensors=(
        TensorNames(
            modules={
                **HF_NAMES.modules,
                "layers.qkv": "model.layers.{layer}.self_attn.qkv_proj",
                "layers.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
            },
            fused={"layers.qkv": _QKV, "layers.gate_up": _GATE_UP},
        ),
    ),
    gguf_tensors=TensorNames(
        modules={
            **GGUF_NAMES.modules,
            "layers.qkv": "blk.{layer}.attn_qkv",
            "layers.gate_up": "blk.{layer}.ffn_up",
        },
        fused={"layers.qkv": _QKV, "layers.gate_up": _GATE_UP},
    ),
)

ARCHITECTURES = (PHI3,)
