"""Reading Hugging Face's config.json: what all decoder families share."""

from __future__ import annotations

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.models.config import ModelConfig
from polysilicon.models.rope import (
    Frequencies,
    Yarn,
    as_rope,
    base_frequencies,
    dynamic_ntk_base,
    llama3_frequencies,
    longrope_magnitude,
    yarn_magnitude,
)
from polysilicon.ops import Rope
from polysilicon.weights.fields import Fields

MAX_POSITIONS = (1 << 31) - 1
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 14
MAX_EXPERTS = 1 << 14

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def read_decoder(fields: Fields, architecture: str, max_length: int | None) -> ModelConfig:
    """What config.json says of any of the families: full attention, one rope, no biases.

    Families put their own defaults into `fields` first and replace what differs afterwards.
    max_length: the context to load for; the trained one where it is None.
    """
    hidden_size = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", high=MAX_HEADS, default=heads)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if not fields.has("head_dim") and hidden_size % heads:
        raise fields.refuse(
            "num_attention_heads", f"a divisor of hidden_size = {hidden_size}, or a head_dim"
        )
    head_dim = fields.integer("head_dim", high=MAX_HEAD_DIM, default=hidden_size // heads)
    activation = fields.text("hidden_act")
    if activation not in ACTIVATIONS:
        raise fields.refuse("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    positions = fields.integer("max_position_embeddings", high=MAX_POSITIONS)
    parameters = rope_parameters(fields, "full_attention")
    trained = trained_context(parameters, positions)
    length = trained if max_length is None else max_length
    rope = read_rope(parameters, head_dim=head_dim, positions=positions, max_length=length)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", high=1.0),
        activation=ACTIVATIONS[activation],
        max_position=trained,
        max_length=length,
        tied_head=fields.flag("tie_word_embeddings", default=False),
        attention_scale=head_dim**-0.5,
        windows=(None,) * layers,
        ropes=(rope,) * layers,
    )


def sliding_layers(fields: Fields, default: list[bool]) -> list[bool]:
    """Which layers have a sliding window: what `layer_types` says, or else `default`, by layer."""
    if not fields.has("layer_types"):
        return default
    kinds = ("full_attention", "sliding_attention")
    return [kind == kinds[1] for kind in fields.choices("layer_types", len(default), kinds)]


def windows(fields: Fields, sliding: list[bool]) -> tuple[int | None, ...]:
    """`sliding_window` for the layers marked, None for the others and where it is missing."""
    if not fields.has("sliding_window"):
        return (None,) * len(sliding)
    window = fields.integer("sliding_window", high=MAX_POSITIONS)
    return tuple(window if on else None for on in sliding)


def rope_parameters(fields: Fields, kind: str) -> Fields:
    """The rope parameters of layers of one kind, in today's spelling, whichever the file uses.

    Files have `rope_theta` and `rope_scaling` (with `type` or `rope_type`), or `rope_parameters`,
    which may be nested by kind of layer. `rope_theta`, `partial_rotary_factor` and
    `original_max_position_embeddings` may stand beside them.
    """
    section = fields.section("rope_scaling")
    if section.empty:
        section = fields.section("rope_parameters")
    if section.is_section(kind):
        section = section.section(kind)
    rope_type = section.text("rope_type", default=section.text("type", default="default"))
    overrides: dict[str, object] = {"rope_type": "longrope" if rope_type == "su" else rope_type}
    if fields.has("original_max_position_embeddings"):
        overrides["original_max_position_embeddings"] = fields.integer(
            "original_max_position_embeddings", high=MAX_POSITIONS
        )
    beside = {
        "rope_theta": fields.number("rope_theta", default=1e4),
        "partial_rotary_factor": fields.number("partial_rotary_factor", default=1.0),
    }
    return section.with_defaults(beside).with_overrides(overrides)


def trained_context(parameters: Fields, positions: int) -> int:
    """Tokens of context: `max_position_embeddings`, or what YaRN stretches the original to.

    Configs that YaRN was added to by hand keep the unscaled `max_position_embeddings`.
    """
    if parameters.text("rope_type") != "yarn" or not parameters.has("factor"):
        return positions
    original = parameters.integer(
        "original_max_position_embeddings", high=MAX_POSITIONS, default=positions
    )
    return min(max(positions, int(original * _factor(parameters))), MAX_POSITIONS)


def read_rope(parameters: Fields, *, head_dim: int, positions: int, max_length: int) -> Rope:
    """The rope of normalised `parameters`, as transformers computes it.

    positions: `max_position_embeddings`. max_length: the context that dynamic NTK and LongRoPE are
    resolved for.
    """
    kind = parameters.text("rope_type")
    if kind not in ROPE_TYPES:
        raise parameters.refuse("rope_type", f"one of {', '.join(ROPE_TYPES)}")
    base = parameters.number("rope_theta", low=1.0 + 1e-6)
    partial = parameters.number("partial_rotary_factor", high=1.0, default=1.0)
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise ModelError(
            f"{parameters.source} rotates {dim} of head_dim = {head_dim} elements "
            f"(partial_rotary_factor {partial:g}), expected an even number of at least 2. "
            "Check head_dim and partial_rotary_factor."
        )
    frequencies = base_frequencies(base, dim)
    if kind == "linear":
        return as_rope(frequencies / _factor(parameters))
    if kind == "dynamic":
        if dim == 2:
            raise parameters.refuse(
                "rope_type", "another kind, as dynamic needs a head_dim above 2"
            )
        ratio = max_length / positions
        base = dynamic_ntk_base(base, dim, factor=_factor(parameters), ratio=ratio)
        return as_rope(base_frequencies(base, dim))
    if kind == "default":
        return as_rope(frequencies)
    original = parameters.integer(
        "original_max_position_embeddings", high=MAX_POSITIONS, default=positions
    )
    if kind == "yarn":
        return _yarn(parameters, base, dim, original, positions)
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        if low >= high:
            raise parameters.refuse("low_freq_factor", f"less than high_freq_factor = {high:g}")
        return as_rope(
            llama3_frequencies(
                frequencies, factor=_factor(parameters), low=low, high=high, original=original
            )
        )
    return _longrope(parameters, frequencies, original, positions, max_length)


def _factor(parameters: Fields) -> float:
    return parameters.number("factor", low=1e-3, high=1e6)


def _yarn(parameters: Fields, base: float, dim: int, original: int, positions: int) -> Rope:
    factor = _factor(parameters) if parameters.has("factor") else positions / original
    if parameters.has("attention_factor"):
        scale = parameters.number("attention_factor", high=1e3)
    else:
        scale = yarn_magnitude(factor)
        multiplier, divisor = _nonzero(parameters, "mscale"), _nonzero(parameters, "mscale_all_dim")
        if multiplier and divisor:
            scale = yarn_magnitude(factor, multiplier) / yarn_magnitude(factor, divisor)
    yarn = Yarn(
        factor=factor,
        original=original,
        beta_fast=_nonzero(parameters, "beta_fast") or 32.0,
        beta_slow=_nonzero(parameters, "beta_slow") or 1.0,
        truncate=parameters.flag("truncate", default=True),
    )
    return as_rope(yarn.apply(base_frequencies(base, dim), base, dim), scale)


def _longrope(
    parameters: Fields,
    frequencies: Frequencies,
    original: int,
    positions: int,
    max_length: int,
) -> Rope:
    factor = _factor(parameters) if parameters.has("factor") else positions / original
    if parameters.has("attention_factor"):
        scale = parameters.number("attention_factor", high=1e3)
    elif factor > 1 and original < 2:
        raise parameters.refuse("original_max_position_embeddings", "an integer of at least 2")
    else:
        scale = longrope_magnitude(factor, original)
    long = parameters.numbers("long_factor", len(frequencies))
    short = parameters.numbers("short_factor", len(frequencies))
    return as_rope(frequencies / np.array(long if max_length > original else short), scale)


def _nonzero(parameters: Fields, name: str) -> float | None:
    """A number that counts as missing when it is 0, as in transformers."""
    value = parameters.number(name, low=0.0, high=1e6, default=0.0)
    if 0 < value < 1e-6:
        raise parameters.refuse(name, "0 or a number of at least 1e-06")
    return value or None
