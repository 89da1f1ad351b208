"""Tiny random checkpoints of every family, with sizes that groups of 32 divide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from polysilicon.models.registry import architectures, find_hf
from polysilicon.weights.encodings import Float32
from polysilicon.weights.fields import Fields

from .conftest import LLAMA, write_tokenizer

_EXPERTS = {"num_experts_per_tok": 2}
_QWEN_MOE = {
    **_EXPERTS,
    "num_experts": 5,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DEEPSEEK = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "n_group": 2,
    "topk_group": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"class": "Mixtral", **_EXPERTS, "num_local_experts": 3, "sliding_window": 16},
    "qwen2_moe": {"class": "Qwen2Moe", **_QWEN_MOE, "norm_topk_prob": False},
    "qwen3_moe": {"class": "Qwen3Moe", **_QWEN_MOE, "head_dim": 32},
    "gpt_oss": {
        "class": "GptOss",
        **_EXPERTS,
        "num_local_experts": 3,
        "head_dim": 32,
        "sliding_window": 16,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "deepseek_v2": {
        "class": "DeepseekV2",
        **_DEEPSEEK,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {"class": "DeepseekV3", **_DEEPSEEK},
    "phi3": {"class": "Phi3", "pad_token_id": None},
    "olmo2": {"class": "Olmo2"},
    "granite": {
        "class": "Granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "glm": {
        "class": "Glm",
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "head_dim": 16,
        "pad_token_id": None,
    },
    "glm4": {
        "class": "Glm4",
        "head_dim": 16,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "pad_token_id": None,
    },
    "stablelm_head_norms": {
        "class": "StableLm",
        "model_type": "stablelm",
        "layer_norm_eps": 1e-5,
        "qk_layernorm": True,
        "use_parallel_residual": True,
    },
    "stablelm": {
        "class": "StableLm",
        "partial_rotary_factor": 0.25,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": True,
    },
}
"""By `model_type`, or a name of its own: the class and what differs from `LLAMA`."""

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")


def family_config(name: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    changes = dict(FAMILIES[name])
    kind = changes.pop("class")
    return {**LLAMA, "architectures": [f"{kind}ForCausalLM"], "model_type": name, **changes}


def family_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Float32]:
    """Random weights by the names that the family's checkpoints have, as they are published."""
    random = np.random.default_rng(seed)
    fields = Fields(config, "config.json")
    family = find_hf(fields, architectures())
    shapes = family.shapes(family.read_hf(fields, None))
    names = family.hf_tensors[0]
    found: dict[str, Float32] = {}
    for key in shapes:
        source = names.source(key, shapes)
        shape = source.stored_shapes(quantized=False)[0]
        for name in source.tensors:
            values = random.standard_normal(shape)
            if key.endswith("norm.weight"):
                values = np.exp(values * 0.5)
            elif key == "embedding.weight":
                values *= 2
            elif len(shape) > 1 and key.endswith(".weight"):
                # Routers are steep, so that rounding before them seldom changes a choice.
                values *= (2 if "router" in key else 1) / np.sqrt(shape[-1])
            found[name] = values.astype(np.float32)
    return found


def write_family(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A checkpoint directory with a tokenizer, in bfloat16, as models are published."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name: values.astype(ml_dtypes.bfloat16)
        for name, values in family_tensors(config, seed).items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder
