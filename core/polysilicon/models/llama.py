"""Llama 2 and 3, and what is built like them (SmolLM, SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.architecture import Architecture
from polysilicon.models.config import ModelConfig
from polysilicon.models.decoder import build_decoder, decoder_shapes
from polysilicon.models.names import TensorNames
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

HF_NAMES = TensorNames(
    modules={
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "layers.attention_norm": "model.layers.{layer}.input_layernorm",
        "layers.q": "model.layers.{layer}.self_attn.q_proj",
        "layers.k": "model.layers.{layer}.self_attn.k_proj",
        "layers.v": "model.layers.{layer}.self_attn.v_proj",
        "layers.o": "model.layers.{layer}.self_attn.o_proj",
        "layers.q_norm": "model.layers.{layer}.self_attn.q_norm",
        "layers.k_norm": "model.layers.{layer}.self_attn.k_norm",
        "layers.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
        "layers.gate": "model.layers.{layer}.mlp.gate_proj",
        "layers.up": "model.layers.{layer}.mlp.up_proj",
        "layers.down": "model.layers.{layer}.mlp.down_proj",
    }
)

GGUF_NAMES = TensorNames(
    modules={
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "layers.attention_norm": "blk.{layer}.attn_norm",
        "layers.q": "blk.{layer}.attn_q",
        "layers.k": "blk.{layer}.attn_k",
        "layers.v": "blk.{layer}.attn_v",
        "layers.o": "blk.{layer}.attn_output",
        "layers.q_norm": "blk.{layer}.attn_q_norm",
        "layers.k_norm": "blk.{layer}.attn_k_norm",
        "layers.ffn_norm": "blk.{layer}.ffn_norm",
        "layers.gate": "blk.{layer}.ffn_gate",
        "layers.up": "blk.{layer}.ffn_up",
        "layers.down": "blk.{layer}.ffn_down",
        "layers.router": "blk.{layer}.ffn_gate_inp",
        "layers.expert_gate": "blk.{layer}.ffn_gate_exps",
        "layers.expert_up": "blk.{layer}.ffn_up_exps",
        "layers.expert_down": "blk.{layer}.ffn_down_exps",
    }
)

# transformers' LlamaConfig, where a file leaves something out.
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    config = hf_config.read_decoder(fields.with_defaults(_DEFAULTS), "llama", max_length)
    attention_bias = fields.flag("attention_bias", default=False)
    return dataclasses.replace(
        config,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


def _read_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(fields, checkpoint, "llama", max_length, activation="silu")
    # Files of Mistral and Mixtral are `llama` too; llama.cpp itself leaves their window out.
    window = gguf_config.read_window(fields)
    config = dataclasses.replace(config, windows=(window,) * config.layers)
    if not fields.integer("llama.expert_count", low=0, default=0):
        return config
    experts = gguf_config.read_experts(fields, config.layers, size=config.intermediate_size)
    return dataclasses.replace(config, experts=experts)


LLAMA = Architecture(
    name="llama",
    hf_names=("LlamaForCausalLM", "LLaMAForCausalLM"),
    hf_types=("llama",),
    gguf_names=("llama",),
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    hf_tensors=(HF_NAMES,),
    gguf_tensors=GGUF_NAMES,
    shapes=decoder_shapes,
    build=build_decoder,
)

ARCHITECTURES = (LLAMA,)
