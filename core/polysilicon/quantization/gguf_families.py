"""What GGUF's metadata says of single families: mixtures of experts, latent attention, factors.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping

from polysilicon.models.config import Experts, Latent, ModelConfig
from polysilicon.weights.gguf_header import MetadataValue

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2moe",
    "qwen3moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "gpt-oss": "gpt-oss",
    "olmo2": "olmo2",
    "granite": "granite",
    "glm4": "glm4",
    "stablelm": "stablelm",
    "deepseek2": "deepseek2",
    "deepseek3": "deepseek2",
}
"""`general.architecture` by our name of the family."""

Keys = dict[str, MetadataValue | None]

_GATES = {"softmax": 1, "sigmoid": 2}


def family_keys(config: ModelConfig) -> Keys:
    """Keys, without the architecture's prefix, besides or instead of those of every decoder; None
    leaves one out."""
    keys: Keys = {}
    architecture = ARCHITECTURES[config.architecture]
    if config.experts is not None:
        keys |= _experts(config.experts, architecture)
    if config.latent is not None:
        keys |= _latent(config, config.latent)
    if architecture == "stablelm":
        keys |= {
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": config.norm_eps,
            "use_parallel_residual": config.parallel_residual,
        }
    if architecture == "granite":
        assert config.logit_scale is not None
        keys |= {
            "embedding_scale": config.embedding_scale,
            "attention.scale": config.attention_scale,
            "residual_scale": config.residual_scale,
            "logit_scale": 1 / config.logit_scale,
        }
    return keys


def _experts(experts: Experts, architecture: str) -> Keys:
    keys: Keys = {"expert_count": experts.count, "expert_used_count": experts.top_k}
    if architecture != "llama":
        keys["expert_feed_forward_length"] = experts.size
    if architecture == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = experts.shared_size
    if architecture == "deepseek2":
        keys |= {
            "leading_dense_block_count": experts.layers.count(False),
            "expert_shared_count": experts.shared_size // experts.size,
            "expert_weights_scale": experts.scale,
            "expert_weights_norm": experts.renormalize,
            "expert_gating_func": _GATES[experts.scoring],
            "expert_group_count": experts.groups,
            "expert_group_used_count": experts.top_groups,
        }
    return keys


def _latent(config: ModelConfig, latent: Latent) -> Keys:
    """Latent attention with keys and values of every head, which one tensor makes of latents."""
    return {
        "attention.head_count_kv": config.heads,
        "attention.key_length": latent.nope_dim + latent.rope_dim,
        "attention.value_length": latent.value_dim,
        "attention.kv_lora_rank": latent.rank,
        "attention.q_lora_rank": latent.query_rank,
    }


def yarn_keys(parameters: Mapping[str, float], *, latent: bool) -> Keys:
    """YaRN's keys, of what config.json says. latent: attention scores are scaled too, as DeepSeek
    has it."""
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    }
    keys: Keys = {"rope.scaling.type": "yarn"}
    keys |= {f"rope.scaling.{names[name]}": v for name, v in parameters.items() if name in names}
    if latent and "mscale_all_dim" in parameters:
        # As llama.cpp's converter has it: a tenth.
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * parameters["mscale_all_dim"]
    return keys
