"""The metadata of a GGUF file: carried from one, or made of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.models.config import ModelConfig
from polysilicon.models.hf_config import rope_parameters
from polysilicon.models.rope import base_frequencies
from polysilicon.quantization.config_check import differences
from polysilicon.quantization.gguf_families import ARCHITECTURES, Keys, family_keys, yarn_keys
from polysilicon.quantization.gguf_tokenizer import tokenizer_metadata
from polysilicon.quantization.source import ModelSource
from polysilicon.weights.checkpoint import Checkpoint, SafetensorsCheckpoint
from polysilicon.weights.encodings import Dense, Float32, Weight
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import TensorInfo
from polysilicon.weights.gguf import GGUFFile
from polysilicon.weights.gguf_header import MetadataValue

Metadata = dict[str, MetadataValue]

# Of the file that is read and not of the model.
_DROPPED = ("general.alignment", "general.file_type", "general.quantization_version")
_DROPPED_PREFIXES = ("split.", "quantize.imatrix.")
_CARRIED_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_QUANTIZATION_VERSION = 2


def gguf_metadata(source: ModelSource, file_type: int) -> tuple[Metadata, dict[str, Float32]]:
    """Metadata, and the tensors beside the model's own that it needs (rotary factors).

    Raises ModelError for a model, or a tokenizer, that GGUF's keys cannot describe.
    """
    checkpoint = source.checkpoint
    if isinstance(checkpoint, GGUFFile):
        metadata = {
            key: value
            for key, value in checkpoint.metadata.items()
            if key not in _DROPPED and not key.startswith(_DROPPED_PREFIXES)
        }
        extra = {
            name: checkpoint.weight(name).dequantize()
            for name in _CARRIED_TENSORS
            if name in checkpoint.tensors
        }
    else:
        metadata, extra = _from_config(source)
    metadata["general.file_type"] = file_type
    metadata["general.quantization_version"] = _QUANTIZATION_VERSION
    return metadata, extra


def _from_config(source: ModelSource) -> tuple[Metadata, dict[str, Float32]]:
    checkpoint, config, family = source.checkpoint, source.config, source.family
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    if family.name not in ARCHITECTURES:
        raise ModelError(
            f"no GGUF metadata is written for {family.name} models. Write a directory instead, "
            "such as --to compressed-tensors, or start from a GGUF file of this model."
        )
    name = ARCHITECTURES[family.name]
    window = next((window for window in config.windows if window is not None), None)
    keys: Keys = {
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "vocab_size": config.vocab_size,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": _sliding_pattern(config),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }
    rope, extra = _rope(config, _rope_parameters(checkpoint))
    metadata: Metadata = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": checkpoint.path.name,
    }
    for key, value in (keys | family_keys(config) | rope).items():
        if value is not None:
            metadata[f"{name}.{key}"] = value
    _check(source, metadata, extra)
    return metadata | tokenizer_metadata(checkpoint.path, config.vocab_size), extra


def _sliding_pattern(config: ModelConfig) -> MetadataValue | None:
    """Which layers have a window, where some have: all but every n-th as n, else one by one."""
    sliding = [window is not None for window in config.windows]
    if all(sliding) or not any(sliding):
        return None
    period = sliding.index(False) + 1
    if all(on == bool((layer + 1) % period) for layer, on in enumerate(sliding)):
        return period
    return np.array(sliding)


def _rope_parameters(checkpoint: SafetensorsCheckpoint) -> Fields:
    values = checkpoint.config
    text = values.get("text_config")
    fields = Fields(text if isinstance(text, dict) else values, "config.json")
    return rope_parameters(fields, "full_attention")


def _rope(config: ModelConfig, parameters: Fields) -> tuple[Keys, dict[str, Float32]]:
    """Keys and tensors for the rotary embedding of the layers with full attention."""
    full = [layer for layer, window in enumerate(config.windows) if window is None]
    rope = config.ropes[full[0] if full else 0]
    assert rope is not None
    base = parameters.number("rope_theta", default=1e4)
    keys: Keys = {"rope.dimension_count": rope.dim, "rope.freq_base": base}
    if parameters.text("rope_type") == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale_all_dim")
        stated = {
            name: parameters.number(name, low=0.0, high=1e6)
            for name in ("factor", *names)
            if parameters.has(name)
        }
        original = "original_max_position_embeddings"
        if parameters.has(original):
            stated[original] = parameters.integer(original)
        return keys | yarn_keys(stated, latent=config.latent is not None), {}
    if rope.scale != 1:
        raise ModelError(
            "this model's rotary scaling (LongRoPE) is not carried into GGUF. Write a directory "
            "instead, such as --to compressed-tensors."
        )
    factors = base_frequencies(base, rope.dim) / np.array(rope.frequencies)
    if np.allclose(factors, 1, rtol=1e-6):
        return keys, {}
    if np.allclose(factors, factors[0], rtol=1e-6):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factors[0])}
        return keys, {}
    return keys, {"rope_freqs.weight": factors.astype(np.float32)}


class _Tensors:
    """What `read_gguf` looks at of a file that is not written yet."""

    def __init__(self, source: ModelSource, extra: Mapping[str, Float32]) -> None:
        self.path = source.checkpoint.path
        self.tensors: dict[str, TensorInfo] = {}
        shapes = {name: unit.shape for name, unit in source.units.items()}
        shapes |= {name: values.shape for name, values in extra.items()}
        for name, shape in shapes.items():
            self.tensors[name] = TensorInfo(name=name, type="F32", shape=shape, nbytes=0)
        self._extra = extra

    def weight(self, name: str) -> Weight:
        return Dense(array=self._extra[name])


def _check(source: ModelSource, metadata: Metadata, extra: Mapping[str, Float32]) -> None:
    """Read the metadata back and hold it against the model that it is of."""
    config, family = source.config, source.family
    reader = family.read_gguf
    written = cast(Checkpoint, _Tensors(source, extra))
    read = reader(Fields(metadata, "the GGUF file"), written, None)
    odd = differences(read, config)
    if not odd:
        return
    raise ModelError(
        f"GGUF's keys for {family.name} cannot say what this model has "
        f"({', '.join(odd)}). Write a directory instead, such as --to compressed-tensors."
    )
