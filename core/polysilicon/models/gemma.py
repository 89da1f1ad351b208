"""Gemma 2 (arXiv 2408.00118) and the text part of Gemma 3 (arXiv 2503.19786).

Embeddings are scaled by `sqrt(hidden_size)`, exactly; transformers rounds that factor to the
weights' dtype, which in bfloat16 makes 25.25 of 25.298.
"""

from __future__ import annotations

import dataclasses
import math

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.architecture import Architecture
from polysilicon.models.config import ModelConfig
from polysilicon.models.decoder import build_decoder, decoder_shapes
from polysilicon.models.llama import GGUF_NAMES, HF_NAMES
from polysilicon.models.names import TensorNames
from polysilicon.models.rope import as_rope, base_frequencies
from polysilicon.ops import Rope
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

_HF_MODULES = {
    **HF_NAMES.modules,
    "layers.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "layers.post_ffn_norm": "model.layers.{layer}.post_feedforward_layernorm",
}

_GGUF_NAMES = TensorNames(
    modules={
        **GGUF_NAMES.modules,
        "layers.post_attention_norm": "blk.{layer}.post_attention_norm",
        "layers.post_ffn_norm": "blk.{layer}.post_ffw_norm",
    }
)

# The text model inside a multimodal checkpoint, as older and newer transformers save it.
_NESTED = tuple(
    TensorNames(
        modules={
            own: prefix + name.removeprefix(removed) if name.startswith("model.") else head
            for own, name in _HF_MODULES.items()
        }
    )
    for prefix, removed, head in (
        ("language_model.", "", "language_model.lm_head"),
        ("model.language_model.", "model.", "lm_head"),
    )
)

# transformers' Gemma2Config and Gemma3TextConfig, where a file leaves something out, as the text
# part of multimodal ones does.
_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA2_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}

# Layers of the 27B models, the only ones whose attention scale does not follow from the head width;
# GGUF has no key for it.
_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62


def _read_hf(fields: Fields, name: str, max_length: int | None) -> ModelConfig:
    """What Gemma 2 and 3 share; `fields` has their defaults."""
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.refuse("use_bidirectional_attention", "false: encoders are not supported")
    activation = fields.text("hidden_activation")
    config = hf_config.read_decoder(
        fields.with_overrides({"hidden_act": activation}), name, max_length
    )
    bias = fields.flag("attention_bias", default=False)
    return _as_gemma(
        dataclasses.replace(
            config,
            qkv_bias=bias,
            o_bias=bias,
            attention_scale=fields.number("query_pre_attn_scalar", low=1e-6, high=1e9) ** -0.5,
            attention_softcap=_cap(fields, "attn_logit_softcapping"),
            final_softcap=_cap(fields, "final_logit_softcapping"),
        )
    )


def _as_gemma(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        config,
        post_norms=True,
        unit_offset_norms=True,
        embedding_scale=math.sqrt(config.hidden_size),
    )


def _read_gemma2(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_GEMMA2_DEFAULTS)
    config = _read_hf(fields, "gemma2", max_length)
    sliding = hf_config.sliding_layers(fields, [layer % 2 == 0 for layer in range(config.layers)])
    return dataclasses.replace(config, windows=hf_config.windows(fields, sliding))


def _read_gemma3(fields: Fields, max_length: int | None) -> ModelConfig:
    if fields.has("text_config"):
        tied = fields.flag("tie_word_embeddings", default=True)
        fields = fields.section("text_config").with_overrides({"tie_word_embeddings": tied})
    fields = fields.with_defaults(_GEMMA3_DEFAULTS)
    config = _read_hf(fields, "gemma3", max_length)
    period = fields.integer("sliding_window_pattern", high=hf_config.MAX_LAYERS)
    sliding = hf_config.sliding_layers(
        fields, [(layer + 1) % period != 0 for layer in range(config.layers)]
    )
    # Scaling is for global layers alone; local ones have a base of their own.
    local = fields.section("rope_parameters").section("sliding_attention")
    rope = hf_config.read_rope(
        local.with_defaults(
            {
                "rope_type": local.text("type", default="default"),
                "rope_theta": fields.number("rope_local_base_freq"),
            }
        ),
        head_dim=config.head_dim,
        positions=config.max_position,
        max_length=config.max_length,
    )
    return dataclasses.replace(
        config,
        qk_norm=True,
        windows=hf_config.windows(fields, sliding),
        ropes=_ropes(config, sliding, rope),
    )


def _ropes(config: ModelConfig, sliding: list[bool], local: Rope) -> tuple[Rope | None, ...]:
    return tuple(local if on else rope for on, rope in zip(sliding, config.ropes, strict=True))


def _read_gguf(
    fields: Fields, checkpoint: Checkpoint, name: str, max_length: int | None, large: int
) -> ModelConfig:
    """What Gemma 2 and 3 share. large: layers of the 27B model."""
    config = gguf_config.read_decoder(fields, checkpoint, name, max_length, activation="gelu_tanh")
    if config.layers == large:
        config = dataclasses.replace(
            config, attention_scale=(config.hidden_size // config.heads) ** -0.5
        )
    return _as_gemma(config)


def _cap(fields: Fields, name: str, default: float = 0.0) -> float | None:
    """A soft cap; 0 means none."""
    return fields.number(name, low=0.0, high=1e6, default=default) or None


def _read_gemma2_gguf(
    fields: Fields, checkpoint: Checkpoint, max_length: int | None
) -> ModelConfig:
    config = _read_gguf(fields, checkpoint, "gemma2", max_length, _GEMMA2_27B_LAYERS)
    prefix = fields.text("general.architecture")
    window = gguf_config.read_window(fields, default=4096)
    sliding = gguf_config.sliding_layers(fields, prefix, config.layers, period=2)
    return dataclasses.replace(
        config,
        attention_softcap=_cap(fields, f"{prefix}.attn_logit_softcapping", 50.0),
        final_softcap=_cap(fields, f"{prefix}.final_logit_softcapping", 30.0),
        windows=tuple(window if on else None for on in sliding),
    )


def _read_gemma3_gguf(
    fields: Fields, checkpoint: Checkpoint, max_length: int | None
) -> ModelConfig:
    config = _read_gguf(fields, checkpoint, "gemma3", max_length, _GEMMA3_27B_LAYERS)
    prefix = fields.text("general.architecture")
    config = dataclasses.replace(
        config, qk_norm=True, final_softcap=_cap(fields, f"{prefix}.final_logit_softcapping", 0.0)
    )
    window = gguf_config.read_window(fields)
    if window is None:
        return config
    sliding = gguf_config.sliding_layers(fields, prefix, config.layers, period=6)
    rope = config.ropes[0]
    assert rope is not None
    base = fields.number(f"{prefix}.rope.freq_base_swa", low=1.0 + 1e-6, default=1e4)
    return dataclasses.replace(
        config,
        windows=tuple(window if on else None for on in sliding),
        ropes=_ropes(config, sliding, as_rope(base_frequencies(base, rope.dim))),
    )


GEMMA2 = Architecture(
    name="gemma2",
    hf_names=("Gemma2ForCausalLM",),
    hf_types=("gemma2",),
    gguf_names=("gemma2",),
    read_hf=_read_gemma2,
    read_gguf=_read_gemma2_gguf,
    hf_tensors=(TensorNames(modules=_HF_MODULES),),
    gguf_tensors=_GGUF_NAMES,
    shapes=decoder_shapes,
    build=build_decoder,
)

GEMMA3 = dataclasses.replace(
    GEMMA2,
    name="gemma3",
    hf_names=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    hf_types=("gemma3_text", "gemma3"),
    gguf_names=("gemma3",),
    read_hf=_read_gemma3,
    read_gguf=_read_gemma3_gguf,
    hf_tensors=(TensorNames(modules=_HF_MODULES), *_NESTED),
)

ARCHITECTURES = (GEMMA2, GEMMA3)
