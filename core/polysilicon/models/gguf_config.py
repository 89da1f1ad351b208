"""Reading GGUF's metadata: what all decoder families share.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; defaults are llama.cpp's.
"""

from __future__ import annotations

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.models.config import Experts, ModelConfig
from polysilicon.models.hf_config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
)
from polysilicon.models.rope import Frequencies, Yarn, as_rope, base_frequencies, yarn_magnitude
from polysilicon.ops import Rope
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.fields import Fields

ROPE_TYPES = ("none", "linear", "yarn", "longrope")


def read_decoder(
    fields: Fields,
    checkpoint: Checkpoint,
    architecture: str,
    max_length: int | None,
    *,
    activation: str,
    norm_eps: str = "layer_norm_rms_epsilon",
    truncate: bool = True,
) -> ModelConfig:
    """What metadata and tensors say of any of the families: full attention, one rope, no experts.

    Biases and an untied head are there when their tensors are. Families replace what differs.
    max_length: the context to load for; the trained one where it is None. norm_eps: the key of the
    norms' epsilon. truncate: as in `Yarn`.
    """
    prefix = fields.text("general.architecture")
    hidden_size = fields.integer(f"{prefix}.embedding_length")
    heads = fields.integer(f"{prefix}.attention.head_count", high=MAX_HEADS)
    kv_heads = fields.integer(f"{prefix}.attention.head_count_kv", high=MAX_HEADS, default=heads)
    layers = fields.integer(f"{prefix}.block_count", high=MAX_LAYERS)
    if heads % kv_heads:
        raise fields.refuse(
            f"{prefix}.attention.head_count_kv", f"a divisor of the {heads} attention heads"
        )
    if not fields.has(f"{prefix}.attention.key_length") and hidden_size % heads:
        raise fields.refuse(
            f"{prefix}.attention.head_count", f"a divisor of embedding_length = {hidden_size}"
        )
    head_dim = fields.integer(
        f"{prefix}.attention.key_length", high=MAX_HEAD_DIM, default=hidden_size // heads
    )
    fields.integer(
        f"{prefix}.attention.value_length", low=head_dim, high=head_dim, default=head_dim
    )
    positions = fields.integer(f"{prefix}.context_length", high=MAX_POSITIONS)
    trained = _trained_context(fields, prefix, positions)
    length = trained if max_length is None else max_length
    rope = read_rope(
        fields,
        checkpoint,
        prefix,
        head_dim=head_dim,
        positions=positions,
        max_length=length,
        truncate=truncate,
    )
    tensors = checkpoint.tensors
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(fields, prefix),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{prefix}.feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number(f"{prefix}.attention.{norm_eps}", high=1.0),
        activation=activation,
        max_position=trained,
        max_length=length,
        tied_head="output.weight" not in tensors,
        attention_scale=head_dim**-0.5,
        windows=(None,) * layers,
        ropes=(rope,) * layers,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
    )


def _vocab_size(fields: Fields, prefix: str) -> int:
    """Length of the token list, as in llama.cpp; files without a tokenizer state a number."""
    tokens = fields.length("tokenizer.ggml.tokens")
    return tokens if tokens else fields.integer(f"{prefix}.vocab_size")


def _trained_context(fields: Fields, prefix: str, positions: int) -> int:
    """`context_length`, or what YaRN stretches the original context to."""
    if fields.text(f"{prefix}.rope.scaling.type", default="linear") != "yarn":
        return positions
    original = fields.integer(
        f"{prefix}.rope.scaling.original_context_length", high=MAX_POSITIONS, default=positions
    )
    return min(max(positions, int(original * _factor(fields, prefix))), MAX_POSITIONS)


def _factor(fields: Fields, prefix: str) -> float:
    """The stretch of positions; 0 means none. `rope.scale_linear` is its old name."""
    old = fields.number(f"{prefix}.rope.scale_linear", low=0.0, high=1e6, default=0.0)
    name = f"{prefix}.rope.scaling.factor"
    factor = fields.number(name, low=0.0, high=1e6, default=old) or 1.0
    if factor < 1e-3:
        raise fields.refuse(name, "0 or a number of at least 0.001")
    return factor


def read_rope(
    fields: Fields,
    checkpoint: Checkpoint,
    prefix: str,
    *,
    head_dim: int,
    positions: int,
    max_length: int,
    truncate: bool = True,
) -> Rope:
    """The rope of the metadata and of the tensors of per-frequency factors, as llama.cpp has it.

    Llama 3's scaling comes as `rope_freqs.weight`, LongRoPE's as two such tensors, between which
    `max_length` decides. Every factor divides its frequency, before the scaling of `rope.scaling`.
    truncate: as in `Yarn`; the metadata does not say it.
    """
    name = f"{prefix}.rope.dimension_count"
    dim = fields.integer(name, high=head_dim, default=head_dim)
    if dim % 2:
        raise ModelError(
            f"{fields.source} rotates {dim} elements of a head ({name}, or "
            f"{prefix}.attention.key_length where that is missing), expected an even number. "
            "Convert the model again with a current llama.cpp."
        )
    base = fields.number(f"{prefix}.rope.freq_base", low=1.0 + 1e-6, default=1e4)
    scaling = f"{prefix}.rope.scaling"
    kind = fields.text(f"{scaling}.type", default="linear")
    if kind not in ROPE_TYPES:
        raise fields.refuse(f"{scaling}.type", f"one of {', '.join(ROPE_TYPES)}")
    original = fields.integer(
        f"{scaling}.original_context_length", high=MAX_POSITIONS, default=positions
    )
    frequencies = base_frequencies(base, dim)
    ranges = "rope_factors_long" if max_length > original else "rope_factors_short"
    for tensor in ("rope_freqs.weight", f"{ranges}.weight"):
        if tensor in checkpoint.tensors:
            frequencies = frequencies / _factors(checkpoint, tensor, dim // 2)
            break
    factor = _factor(fields, prefix)
    scale = fields.number(f"{scaling}.attn_factor", high=1e3, default=1.0)
    if kind == "none":
        return as_rope(frequencies, scale)
    if kind != "yarn":
        return as_rope(frequencies / factor, scale)
    fields.number(f"{scaling}.yarn_ext_factor", low=1.0, high=1.0, default=1.0)
    yarn = Yarn(
        factor=factor,
        original=original,
        beta_fast=fields.number(f"{scaling}.yarn_beta_fast", low=1e-6, high=1e6, default=32.0),
        beta_slow=fields.number(f"{scaling}.yarn_beta_slow", low=1e-6, high=1e6, default=1.0),
        truncate=truncate,
    )
    if fields.has(f"{scaling}.yarn_attn_factor"):
        # The converter copies transformers' attention_factor here, which is the whole magnitude.
        scale *= fields.number(f"{scaling}.yarn_attn_factor", high=1e3)
    else:
        divisor = fields.number(f"{scaling}.yarn_log_multiplier", low=0.0, high=1e3, default=0.0)
        scale *= yarn_magnitude(factor) / yarn_magnitude(factor, divisor)
    return as_rope(yarn.apply(frequencies, base, dim), scale)


def _factors(checkpoint: Checkpoint, name: str, count: int) -> Frequencies:
    shape = checkpoint.tensors[name].shape
    if shape != (count,):
        raise ModelError(
            f"{checkpoint.path}: tensor {name} has shape {shape}, expected {(count,)}. "
            "Convert the model again with a current llama.cpp."
        )
    factors = checkpoint.weight(name).dequantize().astype(np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(
            f"{checkpoint.path}: tensor {name} holds factors that are not positive numbers. "
            "Download the file again."
        )
    return factors


def read_window(fields: Fields, default: int = 0) -> int | None:
    """The sliding window, in tokens; 0 means none."""
    name = f"{fields.text('general.architecture')}.attention.sliding_window"
    return fields.integer(name, low=0, high=MAX_POSITIONS, default=default) or None


def read_experts(fields: Fields, layers: int, *, size: int | None = None) -> Experts:
    """Mixtures of experts in every layer, with a softmax over all of them before the choice.

    size: inner width of an expert where the metadata does not say it.
    """
    prefix = fields.text("general.architecture")
    count = fields.integer(f"{prefix}.expert_count", high=MAX_EXPERTS)
    return Experts(
        layers=(True,) * layers,
        count=count,
        size=fields.integer(f"{prefix}.expert_feed_forward_length", default=size),
        top_k=fields.integer(f"{prefix}.expert_used_count", high=count),
    )


def sliding_layers(fields: Fields, prefix: str, layers: int, period: int) -> list[bool]:
    """Which layers have a sliding window: all but every `period`-th, or what the file says.

    The file's `sliding_window_pattern` is a period or a list by layer.
    """
    name = f"{prefix}.attention.sliding_window_pattern"
    if fields.is_array(name):
        return fields.flags(name, layers)
    period = fields.integer(name, low=1, high=MAX_LAYERS, default=period)
    return [(layer + 1) % period != 0 for layer in range(layers)]
