"""Qwen2-MoE (a shared expert with a gate of its own) and Qwen3-MoE: Qwen with mixtures of experts.

Some layers may be dense.
"""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.config import Experts, ModelConfig
from polysilicon.models.llama import GGUF_NAMES, HF_NAMES, LLAMA
from polysilicon.models.names import TensorNames, mlx_experts
from polysilicon.models.qwen import QWEN2, QWEN3
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

# transformers' Qwen2MoeConfig and Qwen3MoeConfig, where a file leaves something out.
_DEFAULTS = {"decoder_sparse_step": 1, "norm_topk_prob": False, "mlp_only_layers": []}
_QWEN2_DEFAULTS = {
    **_DEFAULTS,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3_DEFAULTS = {
    **_DEFAULTS,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "sliding_window": 4096,
}

_MLP = "model.layers.{layer}.mlp"
_QWEN3_HF_NAMES = TensorNames(
    modules={
        **HF_NAMES.modules,
        "layers.router": f"{_MLP}.gate",
        "layers.expert_gate": f"{_MLP}.experts.{{expert}}.gate_proj",
        "layers.expert_up": f"{_MLP}.experts.{{expert}}.up_proj",
        "layers.expert_down": f"{_MLP}.experts.{{expert}}.down_proj",
    }
)
_QWEN2_HF_NAMES = _QWEN3_HF_NAMES.with_modules(
    {
        "layers.shared_router": f"{_MLP}.shared_expert_gate",
        "layers.shared_gate": f"{_MLP}.shared_expert.gate_proj",
        "layers.shared_up": f"{_MLP}.shared_expert.up_proj",
        "layers.shared_down": f"{_MLP}.shared_expert.down_proj",
    }
)
_QWEN2_GGUF_NAMES = GGUF_NAMES.with_modules(
    {
        "layers.shared_router": "blk.{layer}.ffn_gate_inp_shexp",
        "layers.shared_gate": "blk.{layer}.ffn_gate_shexp",
        "layers.shared_up": "blk.{layer}.ffn_up_shexp",
        "layers.shared_down": "blk.{layer}.ffn_down_shexp",
    }
)


def _read_experts(fields: Fields, layers: int) -> Experts:
    """What both have in config.json."""
    step = fields.integer("decoder_sparse_step", high=hf_config.MAX_LAYERS)
    dense = fields.integers("mlp_only_layers", high=hf_config.MAX_LAYERS)
    # transformers 5 saves Qwen3-MoE's number under another name.
    name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    count = fields.integer(name, high=hf_config.MAX_EXPERTS)
    return Experts(
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        count=count,
        size=fields.integer("moe_intermediate_size"),
        top_k=fields.integer("num_experts_per_tok", high=count),
        renormalize=fields.flag("norm_topk_prob", default=False),
    )


def _windows(fields: Fields, sliding: list[bool]) -> tuple[int | None, ...]:
    """Those that transformers has, which differ from those of the dense Qwens; in Qwen3-MoE all
    layers have one."""
    if not fields.flag("use_sliding_window", default=False):
        return (None,) * len(sliding)
    return hf_config.windows(fields, sliding)


def _read_qwen2(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_QWEN2_DEFAULTS)
    config = dataclasses.replace(QWEN2.read_hf(fields, max_length), architecture="qwen2moe")
    last = fields.integer("max_window_layers", low=0)
    every_other = [layer % 2 == 0 and layer < last for layer in range(config.layers)]
    sliding = hf_config.sliding_layers(fields, every_other)
    experts = dataclasses.replace(
        _read_experts(fields, config.layers),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_router=True,
    )
    bias = fields.flag("qkv_bias", default=True)
    return dataclasses.replace(
        config, qkv_bias=bias, experts=experts, windows=_windows(fields, sliding)
    )


def _read_qwen3(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_QWEN3_DEFAULTS)
    config = dataclasses.replace(QWEN3.read_hf(fields, max_length), architecture="qwen3moe")
    sliding = [True] * config.layers
    config = dataclasses.replace(config, windows=_windows(fields, sliding))
    return dataclasses.replace(config, experts=_read_experts(fields, config.layers))


def _read_qwen2_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(fields, checkpoint, "qwen2moe", max_length, activation="silu")
    # Early files have neither width: all experts of a token together are as wide as a dense block.
    used = fields.integer("qwen2moe.expert_used_count", high=hf_config.MAX_EXPERTS)
    inner = config.intermediate_size
    experts = gguf_config.read_experts(fields, config.layers, size=inner // used)
    shared = fields.integer("qwen2moe.expert_shared_feed_forward_length", default=inner)
    return dataclasses.replace(
        config,
        experts=dataclasses.replace(
            experts, renormalize=False, shared_size=shared, shared_router=True
        ),
    )


def _read_qwen3_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(fields, checkpoint, "qwen3moe", max_length, activation="silu")
    return dataclasses.replace(
        config, qk_norm=True, experts=gguf_config.read_experts(fields, config.layers)
    )


QWEN2_MOE = dataclasses.replace(
    LLAMA,
    name="qwen2moe",
    hf_names=("Qwen2MoeForCausalLM",),
    hf_types=("qwen2_moe",),
    gguf_names=("qwen2moe",),
    read_hf=_read_qwen2,
    read_gguf=_read_qwen2_gguf,
    hf_tensors=(_QWEN2_HF_NAMES, _QWEN2_HF_NAMES.with_modules(mlx_experts(_MLP))),
    gguf_tensors=_QWEN2_GGUF_NAMES,
)

QWEN3_MOE = dataclasses.replace(
    LLAMA,
    name="qwen3moe",
    hf_names=("Qwen3MoeForCausalLM",),
    hf_types=("qwen3_moe",),
    gguf_names=("qwen3moe",),
    read_hf=_read_qwen3,
    read_gguf=_read_qwen3_gguf,
    hf_tensors=(_QWEN3_HF_NAMES, _QWEN3_HF_NAMES.with_modules(mlx_experts(_MLP))),
)

ARCHITECTURES = (QWEN2_MOE, QWEN3_MOE)
