"""Granite 3: Llama with factors on embeddings, attention scores, the residual stream and logits."""

from __future__ import annotations

import dataclasses

from polysilicon.models import gguf_config
from polysilicon.models.config import ModelConfig
from polysilicon.models.llama import LLAMA
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields


def _read_hf(fields: Fields, max_length: int | None) -> ModelConfig:
    return dataclasses.replace(
        LLAMA.read_hf(fields, max_length),
        architecture="granite",
        embedding_scale=_factor(fields, "embedding_multiplier"),
        attention_scale=_factor(fields, "attention_multiplier"),
        residual_scale=_factor(fields, "residual_multiplier"),
        logit_scale=1 / _factor(fields, "logits_scaling"),
    )


def _read_gguf(fields: Fields, checkpoint: Checkpoint, max_length: int | None) -> ModelConfig:
    config = gguf_config.read_decoder(fields, checkpoint, "granite", max_length, activation="silu")
    return dataclasses.replace(
        config,
        embedding_scale=_factor(fields, "granite.embedding_scale"),
        attention_scale=_factor(fields, "granite.attention.scale", config.attention_scale),
        residual_scale=_factor(fields, "granite.residual_scale"),
        logit_scale=1 / _factor(fields, "granite.logit_scale"),
    )


def _factor(fields: Fields, name: str, default: float = 1.0) -> float:
    return fields.number(name, low=1e-6, high=1e6, default=default)


GRANITE = dataclasses.replace(
    LLAMA,
    name="granite",
    hf_names=("GraniteForCausalLM",),
    hf_types=("granite",),
    gguf_names=("granite",),
    read_hf=_read_hf,
    read_gguf=_read_gguf,
)

ARCHITECTURES = (GRANITE,)
