"""StableLM: layer norms with biases, and a quarter of each head rotates."""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config, hf_config
from polysilicon.models.config import ModelConfig
from polysilicon.models.llama import LLAMA
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

# transformers' StableLmConfig, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
}


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    # StableLM 2 12B has both.
    for name in ("qk_layernorm", "use_parallel_residual"):
        if fields.flag(name, default=False):
            raise fields.refuse(name, "false: this variant of StableLM is not supported")
    fields = fields.with_defaults(_DEFAULTS)
    epsilon = fields.number("layer_norm_eps", high=1.0)
    config = hf_config.read_decoder(
        fields.with_overrides({"rms_norm_eps": epsilon}), "stablelm", max_length
    )
    bias = fields.flag("use_qkv_bias", default=False)
    return dataclasses.replace(config, layer_norms=True, qkv_bias=bias)


def _read_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(
        fields,
        checkpoint,
        "stablelm",
        max_length,
        activation="silu",
        norm_eps="layer_norm_epsilon",
    )
    return dataclasses.replace(config, layer_norms=True)


STABLELM = dataclasses.replace(
    LLAMA,
    name="stablelm",
    hf_names=("StableLmForCausalLM",),
    hf_types=("stablelm",),
    gguf_names=("stablelm",),
    read_hf=_read_hf,
    read_gguf=_read_gguf,
)

ARCHITECTURES = (STABLELM,)
