"""How a checkpoint's weights are stored, as far as its config.json says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polysilicon.weights.fields import Fields
from polysilicon.weights.files import shown

_KEYS = ("quantization", "quantization_config", "compression_config")
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

# Bits of an element with its scales and the encoding that its reader gives, where a name says both:
# OCP Microscaling Formats 1.0 has a byte for 32 elements, NVFP4 one for 16.
_NAMED = {
    "fp8": (8.0, "float:f8_e4m3"),
    "fbgemm_fp8": (8.0, "float:f8_e4m3"),
    "mxfp4": (4.25, "float:f4_e2m1/32"),
    "mxfp8": (8.25, "float:f8_e4m3/32"),
    "nvfp4": (4.5, "float:f4_e2m1/16"),
}
_BITS = ("bits", "num_bits", "w_bit", "nbits", "weight_bits")
_GROUPS = ("group_size", "q_group_size")
_SCALE_BITS = 16

_COUNTED = (
    "Weights are counted from what config.json says of their quantisation, embeddings, head and "
    "vectors as not quantised: only the headers of the weights tell of every tensor."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """What weights take.

    dtype: of what is not quantised, a key of `DENSE_DTYPES`. bits: of an element of a quantised
    matrix with its share of scales, None where nothing is quantised. encoding: of such a matrix, as
    `Weight.encoding`. experts_only: no other matrices are. notes: what was taken for granted.
    """

    dtype: str
    bits: float | None = None
    encoding: str = ""
    experts_only: bool = False
    notes: tuple[str, ...] = ()


def stored_weights(config: Mapping[str, object], source: str) -> StoredWeights:
    """How weights are stored, by the object of a config.json. source: what errors call the file.

    Raises ModelError for settings that cannot be.
    """
    parts = [config]
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        parts.append(text_config)
    stored = StoredWeights(dtype="bf16", notes=("config.json names no dtype: bf16 is counted.",))
    for name in (part.get(key) for part in parts for key in ("dtype", "torch_dtype")):
        if isinstance(name, str) and name in _DTYPES:
            stored = StoredWeights(dtype=_DTYPES[name])
            break
    for part in parts:
        for key in _KEYS:
            settings = part.get(key)
            if isinstance(settings, Mapping):
                return _quantized(stored, settings, f"{source}, {key},")
    return stored


def _quantized(stored: StoredWeights, settings: Mapping[str, object], source: str) -> StoredWeights:
    fields = Fields(settings, source)
    names = [fields.text(key, default="").lower() for key in ("quant_method", "quant_algo", "mode")]
    names.append(fields.text("format", default="").lower().removesuffix("-pack-quantized"))
    for name in names:
        if name in _NAMED:
            # transformers' own mxfp4 is gpt-oss's.
            experts_only = names[0] == "mxfp4"
            return _with(dataclasses.replace(stored, experts_only=experts_only), *_NAMED[name])
    if names[0] == "bitsandbytes":
        # A float32 for 64 elements (QLoRA, arXiv 2305.14314), or one for each row.
        four = fields.flag("load_in_4bit", default=False)
        return _with(stored, *((4.5, "float:codebook/64") if four else (8.0, "affine:8/row")))
    if names[0] == "compressed-tensors":
        fields = Fields(_first_group(settings), source)
    bits = _integer(fields, _BITS, low=1, high=16)
    if bits is None:
        note = (
            f"config.json's quantisation {shown(names[0])} is not known: {stored.dtype} is counted."
        )
        return dataclasses.replace(stored, notes=(*stored.notes, note))
    group = _integer(fields, _GROUPS, low=-1, high=1 << 24) or -1
    is_float = fields.text("type", default="int") == "float"
    kind = f"float:f{bits}_{'e4m3' if bits == 8 else 'e2m1'}" if is_float else f"affine:{bits}"
    if group < 1:
        return _with(stored, float(bits), f"{kind}/row")
    # MLX has a bias beside a group's scale, the others at most a zero point of as many bits.
    beside = _SCALE_BITS + (_SCALE_BITS if names[0] in ("", "mlx") else bits)
    return _with(stored, bits + beside / group, f"{kind}/{group}")


def _with(stored: StoredWeights, bits: float, encoding: str) -> StoredWeights:
    return dataclasses.replace(
        stored, bits=bits, encoding=encoding, notes=(*stored.notes, _COUNTED)
    )


def _first_group(settings: Mapping[str, object]) -> Mapping[str, object]:
    """compressed-tensors' settings of weights, of the first of its groups of modules."""
    groups = settings.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _integer(fields: Fields, names: tuple[str, ...], *, low: int, high: int) -> int | None:
    found = [name for name in names if fields.has(name)]
    return fields.integer(found[0], low=low, high=high) if found else None
