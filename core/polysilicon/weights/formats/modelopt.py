"""ModelOpt checkpoints, as NVIDIA's Model Optimizer writes them: FP8, MXFP8 and NVFP4.

FP8: `weight` e4m3 `[N, K]` with `weight_scale`, one number, one of each output, or one of each
block of 128 x 128 (`[N / 128, 1, K / 128, 1]`). MXFP8: the same with e8m0 scales `[N, K / 32]`.
NVFP4: `weight` uint8 `[N, K / 2]`, two e2m1 codes a byte with the lower half first; `weight_scale`
e4m3 `[N, K / 16]`; `weight_scale_2`, a factor of all. An element is `scale * decode(code)`, for
NVFP4 under `weight_scale * weight_scale_2`, rounded to float32.
Where only KV is quantised, weights are as they were; its scales are read by
`polysilicon.models.kv_scales`.
"""

from __future__ import annotations

from collections.abc import Mapping

from polysilicon.errors import ModelError
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import TensorInfo, shown
from polysilicon.weights.formats.checks import refuse, stored
from polysilicon.weights.formats.dense import as_stored, code_tensor
from polysilicon.weights.formats.floats import (
    EXPONENT_TYPES,
    FP8_BLOCK,
    MX_GROUP,
    fp8_reader,
    nvfp4_reader,
)
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.kv_scales import quantizes_kv
from polysilicon.weights.formats.settings import expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

_METHODS = frozenset({"modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"})
_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4",
    "MXFP8", "MIXED_PRECISION",
)  # fmt: skip
REFUSED_ALGORITHMS = {
    "w4a16_awq": "weights are for scaled activations",
    "w4a8_awq": "weights are for scaled activations",
    "nvfp4_awq": "weights are for scaled activations",
    "int8_sq": "weights are for scaled activations",
}
"""By `quant_algo` in lower case, with why they are not read."""

_SCALE = ".weight_scale"
_PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


class ModelOptFormat:
    name = "modelopt"
    encodings: Mapping[str, str] = {
        "modelopt:fp8": "float:f8_e4m3/128x128",
        "modelopt:mxfp8": "float:f8_e4m3/32",
        "modelopt:nvfp4": "float:f4_e2m1/16",
    }

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        if settings is None:
            return False
        return settings.method in _METHODS or (
            not settings.method
            and (_algorithm_fields(settings.fields) is not None or quantizes_kv(settings))
        )

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        settings = expect_method(files, self.name, _METHODS | {""})
        if settings is not None:
            _check_algorithm(settings.fields)
        names = [name.removesuffix(_SCALE) for name in files.tensors if name.endswith(_SCALE)]
        if not names:
            kv_alone = settings is not None and quantizes_kv(settings)
            if kv_alone and code_tensor(files) is None:
                return as_stored(files, files.tensors)
            raise ModelError(
                f"{files.path} has no tensor NAME{_SCALE}, which {self.name} stores. "
                "Leave --quantization out, so that the format is found from the files."
            )
        parts = {f"{name}.{part}" for name in names for part in _PARTS}
        tensors = as_stored(files, (name for name in files.tensors if name not in parts))
        for name in names:
            if f"{name}.pre_quant_scale" in files.tensors:
                raise refuse(
                    files, f"{name}.pre_quant_scale", "scales activations, which is not supported"
                )
            tensors[f"{name}.weight"] = _module(files, name)
        return tensors


def _algorithm_fields(fields: Fields) -> Fields | None:
    """Where `quant_algo` stands: at the top, or in hf_quant_config.json under `quantization`."""
    if fields.has("quant_algo"):
        return fields
    if fields.is_section("quantization") and fields.section("quantization").has("quant_algo"):
        return fields.section("quantization")
    return None


def _check_algorithm(fields: Fields) -> None:
    holder = _algorithm_fields(fields)
    if holder is None:
        return
    algorithm = holder.text("quant_algo")
    if algorithm.upper() not in _ALGORITHMS:
        raise ModelError(
            f"{holder.source} has quant_algo {shown(algorithm)}, which is not read: "
            f"{REFUSED_ALGORITHMS.get(algorithm.lower(), 'it is not known')}. "
            f"Use a checkpoint with one of {', '.join(_ALGORITHMS)}."
        )


def _module(files: SafetensorsDirectory, name: str) -> LogicalTensor:
    """One quantised linear; what it holds follows from the types of its parts."""
    weight, scale = f"{name}.weight", f"{name}.weight_scale"
    info = stored(files, weight, types=("F8_E4M3", "U8"), shape=(None, None))
    shape = info.shape
    if info.type == "U8":
        kind, shape = "nvfp4", (shape[0], 2 * shape[1])
        read = nvfp4_reader(files, weight, scale, f"{name}.weight_scale_2", divisor=False)
    else:
        kind = "mxfp8" if files.tensors[scale].type in EXPONENT_TYPES else "fp8"
        group = MX_GROUP if kind == "mxfp8" else None
        read = fp8_reader(
            files, weight, scale, group=group, block=FP8_BLOCK, static=f"{name}.input_scale"
        )
    parts = (f"{name}.{part}" for part in _PARTS)
    return LogicalTensor(
        info=TensorInfo(
            name=weight,
            type=f"modelopt:{kind}",
            shape=shape,
            nbytes=sum(files.tensors[part].nbytes for part in parts if part in files.tensors),
        ),
        read=read,
    )
