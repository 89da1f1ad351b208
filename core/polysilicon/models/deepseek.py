"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, dense layers first,
then mixtures of many experts beside shared ones, whose choice may be limited to groups."""

from __future__ import annotations

import dataclasses
import functools

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.architecture import Architecture
from polysilicon.models.config import Experts, Latent, ModelConfig
from polysilicon.models.decoder import build_decoder, decoder_shapes
from polysilicon.models.latent_attention import LatentAttention, latent_attention_shapes
from polysilicon.models.llama import GGUF_NAMES, HF_NAMES
from polysilicon.models.names import Fused, TensorNames, mlx_experts
from polysilicon.models.rope import yarn_magnitude
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

# transformers' DeepseekV2Config and DeepseekV3Config, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": False,
}
_V2_DEFAULTS = {**_DEFAULTS, "max_position_embeddings": 2048, "topk_method": "greedy"}
_V3_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 4096,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
}

# transformers' norms of latents have this whatever the config says.
_LATENT_EPS = 1e-6

_LARGEST_MERGE = 16
"""Times the elements of merged projections may grow by. DeepSeek-V3's grow by 4."""

_KV_A = {"layers.kv_a": Fused(modules=("layers.kv_latent", "layers.k_rope"))}
_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"
_HF_NAMES = TensorNames(
    modules={
        **HF_NAMES.modules,
        "layers.q_a": f"{_ATTENTION}.q_a_proj",
        "layers.q_a_norm": f"{_ATTENTION}.q_a_layernorm",
        "layers.q_b": f"{_ATTENTION}.q_b_proj",
        "layers.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa",
        "layers.kv_norm": f"{_ATTENTION}.kv_a_layernorm",
        "layers.kv_b": f"{_ATTENTION}.kv_b_proj",
        "layers.router": f"{_MLP}.gate",
        "layers.expert_gate": f"{_MLP}.experts.{{expert}}.gate_proj",
        "layers.expert_up": f"{_MLP}.experts.{{expert}}.up_proj",
        "layers.expert_down": f"{_MLP}.experts.{{expert}}.down_proj",
        "layers.shared_gate": f"{_MLP}.shared_experts.gate_proj",
        "layers.shared_up": f"{_MLP}.shared_experts.up_proj",
        "layers.shared_down": f"{_MLP}.shared_experts.down_proj",
    },
    tensors={"layers.correction.weight": f"{_MLP}.gate.e_score_correction_bias"},
    fused=_KV_A,
)
_GGUF_NAMES = TensorNames(
    modules={
        **GGUF_NAMES.modules,
        "layers.q_a": "blk.{layer}.attn_q_a",
        "layers.q_a_norm": "blk.{layer}.attn_q_a_norm",
        "layers.q_b": "blk.{layer}.attn_q_b",
        "layers.kv_a": "blk.{layer}.attn_kv_a_mqa",
        "layers.kv_norm": "blk.{layer}.attn_kv_a_norm",
        "layers.kv_b": "blk.{layer}.attn_kv_b",
        "layers.k_b": "blk.{layer}.attn_k_b",
        "layers.v_b": "blk.{layer}.attn_v_b",
        "layers.shared_gate": "blk.{layer}.ffn_gate_shexp",
        "layers.shared_up": "blk.{layer}.ffn_up_shexp",
        "layers.shared_down": "blk.{layer}.ffn_down_shexp",
    },
    tensors={"layers.correction.weight": "blk.{layer}.exp_probs_b.bias"},
    fused=_KV_A,
)


def _with_latents(config: ModelConfig, latent: Latent, scale: float) -> ModelConfig:
    """One key head, as `LatentAttention` has it. scale: on scores, besides that by their width."""
    return dataclasses.replace(
        config,
        kv_heads=1,
        head_dim=latent.rope_dim + latent.rank,
        value_dim=latent.rank,
        attention_scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * scale,
        ropes=tuple(
            rope and dataclasses.replace(rope, interleaved=latent.interleaved)
            for rope in config.ropes
        ),
        latent=latent,
    )


def _check_rank(fields: Fields, name: str, latent: Latent) -> None:
    largest = _LARGEST_MERGE * min(latent.nope_dim, latent.value_dim)
    if latent.rank > largest:
        raise fields.refuse(name, f"at most {largest}, {_LARGEST_MERGE} times a head's width")


def _read_hf(fields: Fields, name: str, max_length: int | None) -> ModelConfig:
    """What both have, with no experts yet."""
    if fields.flag("attention_bias", default=False):
        raise fields.refuse("attention_bias", "false: no published model has these biases")
    fields.integer("moe_layer_freq", low=1, high=1, default=1)
    high = hf_config.MAX_HEAD_DIM
    latent = Latent(
        query_rank=fields.integer("q_lora_rank", high=high) if fields.has("q_lora_rank") else None,
        rank=fields.integer("kv_lora_rank", high=high),
        nope_dim=fields.integer("qk_nope_head_dim", high=high),
        rope_dim=fields.integer("qk_rope_head_dim", high=high),
        value_dim=fields.integer("v_head_dim", high=high),
        norm_eps=_LATENT_EPS,
        interleaved=fields.flag("rope_interleave", default=True),
    )
    _check_rank(fields, "kv_lora_rank", latent)
    config = hf_config.read_decoder(
        fields.with_overrides({"head_dim": latent.rope_dim, "num_key_value_heads": None}),
        name,
        max_length,
    )
    rope = hf_config.rope_parameters(fields, "full_attention")
    magnitude = 1.0
    if rope.text("rope_type") == "yarn" and rope.has("mscale_all_dim"):
        multiplier = rope.number("mscale_all_dim", low=0.0, high=1e3)
        magnitude = yarn_magnitude(rope.number("factor", low=1e-3, high=1e6), multiplier)
    return _with_latents(config, latent, magnitude**2)


def _read_experts(fields: Fields, layers: int, scoring: str) -> Experts:
    """What both have. scoring: the only `scoring_func` there is."""
    if fields.text("scoring_func", default=scoring) != scoring:
        raise fields.refuse("scoring_func", scoring)
    count = fields.integer("n_routed_experts", high=hf_config.MAX_EXPERTS)
    dense = fields.integer("first_k_dense_replace", low=0, high=hf_config.MAX_LAYERS, default=0)
    size = fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", low=0, high=hf_config.MAX_EXPERTS, default=0)
    return Experts(
        layers=tuple(layer >= dense for layer in range(layers)),
        count=count,
        size=size,
        top_k=fields.integer("num_experts_per_tok", high=count),
        scoring=scoring,
        renormalize=fields.flag("norm_topk_prob", default=False),
        scale=fields.number("routed_scaling_factor", low=1e-6, high=1e6, default=1.0),
        shared_size=shared * size,
    )


def _limited_to_groups(
    experts: Experts, fields: Fields, groups_name: str, top_groups_name: str
) -> Experts:
    groups = fields.integer(groups_name, high=experts.count, default=1)
    if experts.count % groups:
        raise fields.refuse(groups_name, f"a divisor of the {experts.count} experts")
    least = -(-experts.top_k * groups // experts.count)
    top_groups = fields.integer(top_groups_name, low=least, high=groups, default=groups)
    return dataclasses.replace(experts, groups=groups, top_groups=top_groups)


def _read_v2(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_V2_DEFAULTS)
    config = _read_hf(fields, "deepseek2", max_length)
    experts = _read_experts(fields, config.layers, "softmax")
    if experts.renormalize:
        raise fields.refuse("norm_topk_prob", "false: no published model has it")
    methods = ("greedy", "group_limited_greedy")
    method = fields.text("topk_method")
    if method not in methods:
        raise fields.refuse("topk_method", f"one of {', '.join(methods)}")
    if method == methods[1]:
        experts = _limited_to_groups(experts, fields, "n_group", "topk_group")
    return dataclasses.replace(config, experts=experts)


def _read_v3(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_V3_DEFAULTS)
    if fields.text("topk_method", default="noaux_tc") != "noaux_tc":
        raise fields.refuse("topk_method", "noaux_tc")
    config = _read_hf(fields, "deepseek3", max_length)
    experts = _limited_to_groups(
        _read_experts(fields, config.layers, "sigmoid"), fields, "n_group", "topk_group"
    )
    return dataclasses.replace(config, experts=dataclasses.replace(experts, correction=True))


def _read_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    high = hf_config.MAX_HEAD_DIM
    at = "deepseek2.attention"
    # Files of 2025 and later have the widths of the absorbed form under the usual keys.
    mla = "_mla" if fields.has(f"{at}.key_length_mla") else ""
    rope_dim = fields.integer("deepseek2.rope.dimension_count", high=high)
    key_dim = fields.integer(f"{at}.key_length{mla}", low=rope_dim + 1, high=high)
    query_rank = fields.integer(f"{at}.q_lora_rank", low=0, high=high, default=0)
    latent = Latent(
        query_rank=query_rank or None,
        rank=fields.integer(f"{at}.kv_lora_rank", high=high),
        nope_dim=key_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer(f"{at}.value_length{mla}", high=high),
        norm_eps=fields.number(f"{at}.layer_norm_rms_epsilon", high=1.0),
        split="blk.0.attn_kv_b.weight" not in checkpoint.tensors,
    )
    _check_rank(fields, f"{at}.kv_lora_rank", latent)
    overrides: dict[str, object] = {
        f"{at}.key_length": rope_dim,
        f"{at}.value_length": rope_dim,
        f"{at}.head_count_kv": None,
    }
    # The converter writes a tenth of transformers' mscale_all_dim, which mscale is equal to in all
    # published models: it cancels in the rotation, and scores have the square.
    logarithmic = "deepseek2.rope.scaling.yarn_log_multiplier"
    multiplier = 10 * fields.number(logarithmic, low=0.0, high=1e3, default=0.0)
    if multiplier:
        overrides[logarithmic] = 1.0
    config = gguf_config.read_decoder(
        fields.with_overrides(overrides), checkpoint, "deepseek2", max_length, activation="silu"
    )
    factor = fields.number("deepseek2.rope.scaling.factor", low=0.0, high=1e6, default=1.0)
    config = _with_latents(config, latent, yarn_magnitude(factor, multiplier) ** 2)
    return dataclasses.replace(config, experts=_read_gguf_experts(fields, checkpoint, config))


def _read_gguf_experts(fields: Fields, checkpoint: Checkpoint, config: ModelConfig) -> Experts:
    experts = gguf_config.read_experts(fields, config.layers)
    dense = fields.integer(
        "deepseek2.leading_dense_block_count", low=0, high=hf_config.MAX_LAYERS, default=0
    )
    gates = {1: "softmax", 2: "sigmoid"}
    gate = fields.integer("deepseek2.expert_gating_func", low=1, high=2, default=1)
    shared = fields.integer(
        "deepseek2.expert_shared_count", low=0, high=hf_config.MAX_EXPERTS, default=0
    )
    experts = dataclasses.replace(
        experts,
        layers=tuple(layer >= dense for layer in range(config.layers)),
        scoring=gates[gate],
        renormalize=fields.flag("deepseek2.expert_weights_norm", default=False),
        scale=fields.number("deepseek2.expert_weights_scale", low=0.0, high=1e6, default=0.0)
        or 1.0,
        correction=f"blk.{dense}.exp_probs_b.bias" in checkpoint.tensors,
        shared_size=shared * experts.size,
    )
    return _limited_to_groups(
        experts, fields, "deepseek2.expert_group_count", "deepseek2.expert_group_used_count"
    )


DEEPSEEK2 = Architecture(
    name="deepseek2",
    hf_names=("DeepseekV2ForCausalLM",),
    hf_types=("deepseek_v2",),
    gguf_names=("deepseek2",),
    read_hf=_read_v2,
    read_gguf=_read_gguf,
    hf_tensors=(_HF_NAMES, _HF_NAMES.with_modules(mlx_experts(_MLP))),
    gguf_tensors=_GGUF_NAMES,
    shapes=functools.partial(decoder_shapes, attention=latent_attention_shapes),
    build=functools.partial(build_decoder, attention=LatentAttention),
)

# GGUF files of these models call themselves `deepseek2`.
DEEPSEEK3 = dataclasses.replace(
    DEEPSEEK2,
    name="deepseek3",
    hf_names=("DeepseekV3ForCausalLM",),
    hf_types=("deepseek_v3",),
    gguf_names=(),
    read_hf=_read_v3,
)

ARCHITECTURES = (DEEPSEEK2, DEEPSEEK3)
