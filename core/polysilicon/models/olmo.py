"""OLMo 2 (arXiv 2501.00656): norms of what comes out of blocks instead of what goes in, and norms
of queries and keys over all heads together."""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.config import ModelConfig
from polysilicon.models.llama import GGUF_NAMES, HF_NAMES, LLAMA
from polysilicon.models.names import TensorNames
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

# transformers' Olmo2Config, where a file leaves something out.
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


def _as_olmo2(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, pre_norms=False, post_norms=True, qk_projection_norm=True)


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    config = hf_config.read_decoder(fields.with_defaults(_DEFAULTS), "olmo2", max_length)
    bias = fields.flag("attention_bias", default=False)
    return _as_olmo2(dataclasses.replace(config, qkv_bias=bias, o_bias=bias))


def _read_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    return _as_olmo2(
        gguf_config.read_decoder(fields, checkpoint, "olmo2", max_length, activation="silu")
    )


_HF_NAMES = TensorNames(
    modules={
        **HF_NAMES.modules,
        "layers.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
        "layers.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
        "layers.post_ffn_norm": "model.layers.{layer}.post_feedforward_layernorm",
    }
)
_GGUF_NAMES = TensorNames(
    modules={
        **GGUF_NAMES.modules,
        "layers.post_attention_norm": "blk.{layer}.post_attention_norm",
        "layers.post_ffn_norm": "blk.{layer}.post_ffw_norm",
    }
)

OLMO2 = dataclasses.replace(
    LLAMA,
    name="olmo2",
    hf_names=("Olmo2ForCausalLM",),
    hf_types=("olmo2",),
    gguf_names=("olmo2",),
    read_hf=_read_hf,
    read_gguf=_read_gguf,
    hf_tensors=(_HF_NAMES,),
    gguf_tensors=_GGUF_NAMES,
)

ARCHITECTURES = (OLMO2,)
