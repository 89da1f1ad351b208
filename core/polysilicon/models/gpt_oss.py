"""gpt-oss (arXiv 2508.10925): mixtures of experts, attention sinks, a window on every other layer.

Experts have a clamped activation of their own (`swiglu_oai`), biases stand everywhere, and YaRN's
blend has ends that are not rounded.
"""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.config import Experts, ModelConfig
from polysilicon.models.llama import GGUF_NAMES, HF_NAMES, LLAMA
from polysilicon.models.names import Fused, TensorNames
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

# transformers' GptOssConfig, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}

_MLP = "model.layers.{layer}.mlp"
_HF_NAMES = TensorNames(
    modules={**HF_NAMES.modules, "layers.router": f"{_MLP}.router"},
    tensors={
        "layers.sinks.weight": "model.layers.{layer}.self_attn.sinks",
        "layers.expert_gate_up.weight": f"{_MLP}.experts.gate_up_proj",
        "layers.expert_gate_up.bias": f"{_MLP}.experts.gate_up_proj_bias",
        "layers.expert_down.weight": f"{_MLP}.experts.down_proj",
        "layers.expert_down.bias": f"{_MLP}.experts.down_proj_bias",
    },
    fused={
        "layers.expert_gate_up": Fused(
            modules=("layers.expert_gate", "layers.expert_up"), interleaved=True
        )
    },
    inputs_first=frozenset({"layers.expert_gate_up", "layers.expert_down"}),
)
_MLX_NAMES = TensorNames(
    modules={
        **HF_NAMES.modules,
        "layers.router": f"{_MLP}.router",
        "layers.expert_gate": f"{_MLP}.experts.gate_proj",
        "layers.expert_up": f"{_MLP}.experts.up_proj",
        "layers.expert_down": f"{_MLP}.experts.down_proj",
    },
    tensors={"layers.sinks.weight": "model.layers.{layer}.self_attn.sinks"},
)
_GGUF_NAMES = TensorNames(
    modules={
        **GGUF_NAMES.modules,
        "layers.ffn_norm": "blk.{layer}.post_attention_norm",
        "layers.sinks": "blk.{layer}.attn_sinks",
    }
)


def _as_gpt_oss(config: ModelConfig, experts: Experts) -> ModelConfig:
    return dataclasses.replace(
        config,
        activation="swiglu_oai",
        sinks=True,
        mlp_bias=True,
        experts=dataclasses.replace(
            experts, scoring="softmax_top_k", renormalize=False, router_bias=True, bias=True
        ),
    )


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    # The activation is defined with these two numbers.
    fields.number("swiglu_limit", low=7.0, high=7.0, default=7.0)
    fields.number("swiglu_alpha", low=1.702, high=1.702, default=1.702)
    config = hf_config.read_decoder(fields, "gpt-oss", max_length)
    sliding = hf_config.sliding_layers(fields, [layer % 2 == 0 for layer in range(config.layers)])
    bias = fields.flag("attention_bias", default=True)
    count = fields.integer("num_local_experts", high=hf_config.MAX_EXPERTS)
    return _as_gpt_oss(
        dataclasses.replace(
            config, windows=hf_config.windows(fields, sliding), qkv_bias=bias, o_bias=bias
        ),
        Experts(
            layers=(True,) * config.layers,
            count=count,
            size=config.intermediate_size,
            top_k=fields.integer("num_experts_per_tok", high=count),
        ),
    )


def _read_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(
        fields, checkpoint, "gpt-oss", max_length, activation="swiglu_oai", truncate=False
    )
    window = gguf_config.read_window(fields, default=128)
    return _as_gpt_oss(
        dataclasses.replace(
            config,
            windows=tuple(window if layer % 2 == 0 else None for layer in range(config.layers)),
        ),
        gguf_config.read_experts(fields, config.layers, size=config.intermediate_size),
    )


GPT_OSS = dataclasses.replace(
    LLAMA,
    name="gpt-oss",
    hf_names=("GptOssForCausalLM",),
    hf_types=("gpt_oss",),
    gguf_names=("gpt-oss",),
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    hf_tensors=(_HF_NAMES, _MLX_NAMES),
    gguf_tensors=_GGUF_NAMES,
)

ARCHITECTURES = (GPT_OSS,)
