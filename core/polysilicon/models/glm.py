"""GLM-4: half of each head rotates, in interleaved pairs; gate and up are one matrix. The models of
2025 (`Glm4ForCausalLM`) have norms of what comes out of blocks too."""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.config import ModelConfig
from polysilicon.models.llama import GGUF_NAMES, HF_NAMES, LLAMA
from polysilicon.models.names import Fused, TensorNames
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

# transformers' GlmConfig and Glm4Config, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}

_GATE_UP = {"layers.gate_up": Fused(modules=("layers.gate", "layers.up"))}
_HF_MODULES = {
    **HF_NAMES.modules,
    "layers.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
}
_GLM4_HF_NAMES = TensorNames(
    modules={
        **_HF_MODULES,
        "layers.post_attention_norm": "model.layers.{layer}.post_self_attn_layernorm",
        "layers.post_ffn_norm": "model.layers.{layer}.post_mlp_layernorm",
    },
    fused=_GATE_UP,
)
_GLM4_GGUF_NAMES = TensorNames(
    modules={
        **GGUF_NAMES.modules,
        "layers.gate_up": "blk.{layer}.ffn_up",
        "layers.post_attention_norm": "blk.{layer}.post_attention_norm",
        "layers.post_ffn_norm": "blk.{layer}.post_ffw_norm",
    },
    fused=_GATE_UP,
)


def _interleaved(config: ModelConfig) -> ModelConfig:
    ropes = tuple(rope and dataclasses.replace(rope, interleaved=True) for rope in config.ropes)
    return dataclasses.replace(config, ropes=ropes)


def _read_glm(fields: Fields, max_length: int | None) -> ModelConfig:
    config = hf_config.read_decoder(fields.with_defaults(_DEFAULTS), "glm", max_length)
    bias = fields.flag("attention_bias", default=True)
    return _interleaved(dataclasses.replace(config, qkv_bias=bias))


def _read_glm4(fields: Fields, max_length: int | None) -> ModelConfig:
    config = _read_glm(fields, max_length)
    return dataclasses.replace(config, architecture="glm4", post_norms=True)


def _read_glm4_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(fields, checkpoint, "glm4", max_length, activation="silu")
    return _interleaved(dataclasses.replace(config, post_norms=True))


GLM4 = dataclasses.replace(
    LLAMA,
    name="glm4",
    hf_names=("Glm4ForCausalLM",),
    hf_types=("glm4",),
    gguf_names=("glm4",),
    read_hf=_read_glm4,
    read_gguf=_read_glm4_gguf,
    hf_tensors=(_GLM4_HF_NAMES,),
    gguf_tensors=_GLM4_GGUF_NAMES,
)

# GGUF files of these models are `chatglm`, which is not read.
GLM = dataclasses.replace(
    GLM4,
    name="glm",
    hf_names=("GlmForCausalLM",),
    hf_types=("glm",),
    gguf_names=(),
    read_hf=_read_glm,
    hf_tensors=(TensorNames(modules=_HF_MODULES, fused=_GATE_UP),),
)

ARCHITECTURES = (GLM, GLM4)
