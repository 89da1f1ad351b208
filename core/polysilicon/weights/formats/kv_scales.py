"""Whether a checkpoint's scales of KV are those of fp8.

compressed-tensors and ModelOpt say in `kv_cache_scheme` how KV is quantised: `type` float of
`num_bits` 8, and `dynamic` where there are no scales. ModelOpt's hf_quant_config.json has
`kv_cache_quant_algo` in its place. Where only the weights are said to be fp8, as AutoFP8 leaves it
(with the word `static` for a scheme), so are scales of KV.
"""

from __future__ import annotations

from collections.abc import Iterator

from polysilicon.weights.fields import Fields
from polysilicon.weights.formats.settings import Settings, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

_SCHEME, _ALGORITHM = "kv_cache_scheme", "kv_cache_quant_algo"


def quantizes_kv(settings: Settings) -> bool:
    """Whether KV is said to be quantised, whatever the weights are."""
    return any(
        holder.has(name) for holder in _holders(settings.fields) for name in (_SCHEME, _ALGORITHM)
    )


def has_fp8_kv_scales(files: SafetensorsDirectory) -> bool:
    """Whether scales of KV, if there are any, are of e4m3 codes. Raises ModelError where what is
    said of them is malformed."""
    settings = stated_settings(files)
    if settings is None:
        return False
    for holder in _holders(settings.fields):
        if holder.is_section(_SCHEME):
            scheme = holder.section(_SCHEME)
            return (
                scheme.text("type", default="") == "float"
                and scheme.integer("num_bits", low=0, default=0) == 8
                and scheme.flag("symmetric", default=True)
                and not scheme.flag("dynamic", default=False)
            )
        if holder.has(_ALGORITHM):
            return holder.text(_ALGORITHM).upper() == "FP8"
    return settings.method in ("fp8", "fbgemm_fp8")


def _holders(fields: Fields) -> Iterator[Fields]:
    """Where it may stand: at the top, or in hf_quant_config.json under `quantization`."""
    yield fields
    if fields.is_section("quantization"):
        yield fields.section("quantization")
