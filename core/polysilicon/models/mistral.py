"""Mistral 7B and its kin: Llama with a sliding window on every layer, where one is configured.

GGUF files of these models call themselves `llama`.
"""

from __future__ import annotations

import dataclasses

from polysilicon.models import hf_config
from polysilicon.models.config import ModelConfig
from polysilicon.models.llama import LLAMA
from polysilicon.weights.fields import Fields

# transformers' MistralConfig, where a file leaves something out.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    config = hf_config.read_decoder(fields, "mistral", max_length)
    return dataclasses.replace(config, windows=hf_config.windows(fields, [True] * config.layers))


MISTRAL = dataclasses.replace(
    LLAMA,
    name="mistral",
    hf_names=("MistralForCausalLM",),
    hf_types=("mistral",),
    gguf_names=(),
    read_hf=_read_hf,
)

ARCHITECTURES = (MISTRAL,)
