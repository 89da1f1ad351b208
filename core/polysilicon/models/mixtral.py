"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer.

GGUF files of these models call themselves `llama`.
"""

from __future__ import annotations

import dataclasses

from polysilicon.models import hf_config
from polysilicon.models.config import Experts, ModelConfig
from polysilicon.models.llama import HF_NAMES, LLAMA
from polysilicon.models.names import TensorNames, mlx_experts
from polysilicon.weights.fields import Fields

# transformers' MixtralConfig, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

_MLP = "model.layers.{layer}.block_sparse_moe"
_HF_NAMES = TensorNames(
    modules={
        **HF_NAMES.modules,
        "layers.router": f"{_MLP}.gate",
        "layers.expert_gate": f"{_MLP}.experts.{{expert}}.w1",
        "layers.expert_up": f"{_MLP}.experts.{{expert}}.w3",
        "layers.expert_down": f"{_MLP}.experts.{{expert}}.w2",
    }
)


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    config = hf_config.read_decoder(fields, "mixtral", max_length)
    count = fields.integer("num_local_experts", high=hf_config.MAX_EXPERTS)
    return dataclasses.replace(
        config,
        windows=hf_config.windows(fields, [True] * config.layers),
        experts=Experts(
            layers=(True,) * config.layers,
            count=count,
            size=config.intermediate_size,
            top_k=fields.integer("num_experts_per_tok", high=count),
        ),
    )


MIXTRAL = dataclasses.replace(
    LLAMA,
    name="mixtral",
    hf_names=("MixtralForCausalLM",),
    hf_types=("mixtral",),
    gguf_names=(),
    read_hf=_read_hf,
    hf_tensors=(_HF_NAMES, _HF_NAMES.with_modules(mlx_experts(_MLP))),
)

ARCHITECTURES = (MIXTRAL,)
