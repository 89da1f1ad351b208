"""The config.json that Hugging Face's tools want, of a model that came as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.models.architecture import Architecture
from polysilicon.models.config import Experts, ModelConfig
from polysilicon.models.mistral import MISTRAL
from polysilicon.models.mixtral import MIXTRAL
from polysilicon.models.rope import base_frequencies, llama3_frequencies
from polysilicon.ops import Rope
from polysilicon.quantization.config_check import differences
from polysilicon.quantization.source import ModelSource
from polysilicon.weights.fields import Fields
from polysilicon.weights.gguf import GGUFFile

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}

# Llama 3's scaling reaches GGUF as factors alone: (factor, low, high, original) of its releases.
_LLAMA3 = tuple((factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0, 16.0, 4.0))
_WRITTEN = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2moe", "qwen3moe"),
    *("gemma2", "gemma3"),
)


def hf_config(source: ModelSource) -> dict[str, Any]:
    """config.json of a GGUF model of one of the families that are written.

    What was written is read back and must give the same model. Raises ModelError where it does not,
    and for other families.
    """
    checkpoint, config, family = source.checkpoint, source.config, source.family
    assert isinstance(checkpoint, GGUFFile)
    if family.name == "llama" and (config.experts is not None or any(config.windows)):
        # Mixtral's and Mistral's GGUF files call themselves llama.
        family = MISTRAL if config.experts is None else MIXTRAL
    if family.name not in _WRITTEN:
        raise ModelError(
            f"no config.json is written for {family.name} models out of GGUF files. "
            "Give the safetensors of this model, or write GGUF, such as --to q4_k_m."
        )
    metadata = checkpoint.metadata
    values: dict[str, Any] = {
        "architectures": [family.hf_names[0]],
        "model_type": "mistral" if family is MISTRAL else family.hf_types[0],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied_head,
        "hidden_act": _ACTIVATIONS[config.activation],
        **_by_family(config, family),
        **_rope(config, metadata, family),
    }
    for name in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{ {'pad': 'padding'}.get(name, name) }_token_id"
        if type(metadata.get(key)) is int:
            values[f"{name}_token_id"] = metadata[key]
    _check(values, config, family)
    return values


def _by_family(config: ModelConfig, family: Architecture) -> dict[str, Any]:
    window = next((window for window in config.windows if window is not None), None)
    kinds = ["sliding_attention" if w is not None else "full_attention" for w in config.windows]
    if family.name == "llama":
        return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if family.name == "mistral":
        return {"sliding_window": window}
    if family.name == "qwen2":
        return {"use_sliding_window": False}
    if family.name == "qwen3":
        return {"attention_bias": config.qkv_bias, "use_sliding_window": False}
    if config.experts is not None:
        return _mixture(config, config.experts, family)
    gemma: dict[str, Any] = {
        "attention_bias": config.qkv_bias,
        "hidden_activation": _ACTIVATIONS[config.activation],
        "query_pre_attn_scalar": _whole(config.attention_scale**-2),
        "sliding_window": window,
        "layer_types": kinds,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    return gemma


def _mixture(config: ModelConfig, experts: Experts, family: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {"num_experts_per_tok": experts.top_k}
    if family is MIXTRAL:
        window = next((window for window in config.windows if window is not None), None)
        return values | {"sliding_window": window, "num_local_experts": experts.count}
    values |= {
        "use_sliding_window": False,
        "num_experts": experts.count,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if family.name == "qwen3moe":
        return values | {"attention_bias": config.qkv_bias}
    return values | {
        "qkv_bias": config.qkv_bias,
        "shared_expert_intermediate_size": experts.shared_size,
    }


def _whole(value: float) -> int | float:
    """A number that is whole but for rounding as an integer."""
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def _rope(config: ModelConfig, metadata: Mapping[str, Any], family: Architecture) -> dict[str, Any]:
    prefix = metadata["general.architecture"]
    full = [layer for layer, window in enumerate(config.windows) if window is None]
    rope = config.ropes[full[0] if full else 0]
    assert rope is not None
    base = float(metadata.get(f"{prefix}.rope.freq_base", 1e4))
    values: dict[str, Any] = {"rope_theta": base}
    if rope.dim != config.head_dim:
        values["partial_rotary_factor"] = rope.dim / config.head_dim
    scaling = _rope_scaling(rope, base)
    if scaling is not None:
        values["rope_scaling"] = scaling
    if family.name == "gemma3":
        local = metadata.get(f"{prefix}.rope.freq_base_swa", 1e4)
        values["rope_local_base_freq"] = float(local)
    return values


def _rope_scaling(rope: Rope, base: float) -> dict[str, Any] | None:
    unscaled = base_frequencies(base, rope.dim)
    found = np.array(rope.frequencies)
    ratio = unscaled / found
    if rope.scale == 1 and np.allclose(ratio, ratio[0], rtol=1e-6):
        if abs(ratio[0] - 1) < 1e-6:
            return None
        return {"rope_type": "linear", "factor": float(ratio[0])}
    for factor, low, high, original in _LLAMA3:
        scaled = llama3_frequencies(unscaled, factor=factor, low=low, high=high, original=original)
        if rope.scale == 1 and np.allclose(scaled, found, rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ModelError(
        "this model's rotary scaling (YaRN or LongRoPE) is not carried from GGUF into config.json. "
        "Give the safetensors of this model, or write GGUF, such as --to q4_k_m."
    )


def _check(values: Mapping[str, Any], config: ModelConfig, family: Architecture) -> None:
    """Hold what config.json says against the model that it is of."""
    read = family.read_hf(Fields(values, "config.json"), None)
    odd = differences(read, config)
    if not odd:
        return
    raise ModelError(
        f"config.json of {family.name} cannot say what this model has "
        f"({', '.join(odd)}). Give the safetensors of this model, or write GGUF, such as "
        "--to q4_k_m."
    )
