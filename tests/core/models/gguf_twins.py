"""Tiny models as GGUF files, with the metadata, names and layouts of llama.cpp's converter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
"""Of types that have another name there."""

EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.\d+\.(?:(gate|up|down)_proj|w([123]))"
)
MIXTRAL_NAMES = {"1": "gate", "2": "down", "3": "up"}


def write_twin(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Float32],
    *,
    changes: Mapping[str, Any],
    added: Mapping[str, Float32],
    without: Sequence[str] = (),
) -> None:
    """Write a model's GGUF file.

    config: its config.json, spelled as before transformers 5. changes: metadata to set besides or
    instead, without the architecture's prefix; None leaves it out. added: tensors besides.
    without: words in the names of tensors that are left out.
    """
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, name)
    _add_metadata(writer, name, config)
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for key, values in stacked(_split_latents(config, weights)).items():
        if key.endswith(".sinks"):
            key += ".weight"
        stored = key if key.startswith("blk.") else names.get_name(key, (".weight", ".bias"))
        assert stored is not None, key
        if not any(word in stored for word in without):
            writer.add_tensor(stored, _converted(name, config, key, values))
    for key, values in added.items():
        writer.add_tensor(key, values)
    for key, value in changes.items():
        key = key if key.startswith("general.") else f"{name}.{key}"
        for fields in writer.kv_data:
            fields.pop(key, None)
        if value is not None:
            _add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _split_latents(config: Mapping[str, Any], weights: Mapping[str, Float32]) -> dict[str, Float32]:
    """DeepSeek's second projection of latents as two tensors, each by head."""
    result: dict[str, Float32] = {}
    for key, values in weights.items():
        if ".kv_b_proj." in key:
            by_head = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            nope = config["qk_nope_head_dim"]
            result[key.replace("kv_b", "k_b")] = by_head[:, :nope].swapaxes(1, 2).copy()
            result[key.replace("kv_b", "v_b")] = by_head[:, nope:].copy()
        else:
            result[key.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return result


GPT_OSS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")


HEAD_NORM = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.\d+\.weight")


def stacked(weights: Mapping[str, Float32]) -> dict[str, Float32]:
    """The weights with experts, and norms of single heads, as stacks, those by their name in
    GGUF."""
    result: dict[str, Float32] = {}
    experts: dict[str, list[Float32]] = {}
    # In the order of their numbers, of which tiny models have fewer than ten.
    for key in sorted(weights):
        match = GPT_OSS.fullmatch(key)
        if match is not None:
            result |= _gpt_oss_experts(match, weights[key])
            continue
        match = HEAD_NORM.fullmatch(key)
        if match is not None:
            name = f"blk.{match[1]}.attn_{match[2]}_norm.weight"
            experts.setdefault(name, []).append(weights[key])
            continue
        match = EXPERT.match(key)
        if match is None:
            result[key] = weights[key]
            continue
        which = match[2] or MIXTRAL_NAMES[match[3]]
        experts.setdefault(f"blk.{match[1]}.ffn_{which}_exps.weight", []).append(weights[key])
    return result | {name: np.stack(parts) for name, parts in experts.items()}


def _gpt_oss_experts(match: re.Match[str], values: Float32) -> dict[str, Float32]:
    """Experts whose gate and up are interleaved, inputs first."""
    kind = "bias" if match[3] else "weight"
    outputs_first = values if match[3] else values.swapaxes(1, 2)
    at = f"blk.{match[1]}.ffn"
    if match[2] == "down":
        return {f"{at}_down_exps.{kind}": outputs_first.copy()}
    return {
        f"{at}_gate_exps.{kind}": outputs_first[:, 0::2].copy(),
        f"{at}_up_exps.{kind}": outputs_first[:, 1::2].copy(),
    }


def _add_metadata(writer: gguf.GGUFWriter, name: str, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_token_list([f"token{index}" for index in range(config["vocab_size"])])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if name == "deepseek2" else config["num_key_value_heads"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_parallel_residual(config.get("use_parallel_residual", False))
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("sliding_window_pattern"):
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
    cap = config.get("final_logit_softcapping", 30.0 if name == "gemma2" else None)
    if cap:
        writer.add_final_logit_softcapping(cap)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    default = 0.5 if name == "glm4" else 1.0
    rotated = int(head_dim * config.get("partial_rotary_factor", default))
    if name == "deepseek2":
        _add_deepseek(writer, config)
    elif rotated < head_dim:
        writer.add_rope_dimension_count(rotated)
    _add_rope_scaling(writer, config, head_dim)
    _add_experts(writer, config)
    for field, add in (
        ("embedding_multiplier", writer.add_embedding_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if field in config:
            add(config[field])


def _add_deepseek(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_rope_dimension_count(rope_dim)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    multiplier = config.get("rope_scaling", {}).get("mscale_all_dim")
    if multiplier:
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config.get("routed_scaling_factor", 1.0))
    third = config["model_type"] == "deepseek_v3"
    writer.add_expert_weights_norm(third)
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID if third else gguf.ExpertGatingFuncType.SOFTMAX
    )
    if "n_group" in config:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _add_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if field in config:
            writer.add_expert_count(config[field])
            writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _converted(name: str, config: Mapping[str, Any], key: str, values: Float32) -> Float32:
    """A tensor as the converter stores it."""
    if name in ("llama", "granite") and ".q_proj." in key:
        return interleaved(values, config["num_attention_heads"])
    if name in ("llama", "granite") and ".k_proj." in key:
        return interleaved(values, config["num_key_value_heads"])
    if name.startswith("gemma") and key.endswith("norm.weight"):
        return values + 1
    return values


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_key_value(
            key, value, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT32
        )
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType.INT64)


def interleaved(values: Float32, heads: int) -> Float32:
    """Rows of q or k as llama.cpp wants them: rotary pairs beside each other."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape).copy()


def _add_rope_scaling(writer: gguf.GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    scaling = config.get("rope_scaling", {})
    kind = scaling.get("rope_type", scaling.get("type"))
    original = scaling.get(
        "original_max_position_embeddings", config.get("original_max_position_embeddings")
    )
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(original)
    elif kind == "longrope":
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        for which in ("long", "short"):
            factors = np.array(scaling[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    elif kind == "llama3":
        factors = []
        for index in range(0, head_dim, 2):
            wavelength = 2 * math.pi * config["rope_theta"] ** (index / head_dim)
            smooth = (original / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            if wavelength < original / scaling["high_freq_factor"]:
                factors.append(1.0)
            elif wavelength > original / scaling["low_freq_factor"]:
                factors.append(scaling["factor"])
            else:
                factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
