"""MLX checkpoints, as mlx-lm writes them.

A matrix `NAME.weight` `[..., N, K * bits / 32]` is uint32 words, each row a stream of K codes,
lowest bit first, with `NAME.scales` `[..., N, K / group]` beside it. Mode `affine` has
`NAME.biases` too and is `scale * code + bias`; `mxfp4`, `mxfp8` (scales E8M0) and `nvfp4` (scales
E4M3) are `scale * value(code)`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import (
    E8M0,
    FLOAT_TABLES,
    GroupAffine,
    GroupFloat,
    Weight,
)
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import TensorInfo
from polysilicon.weights.formats.checks import SCALE_TYPES, finite, refuse, stored
from polysilicon.weights.formats.dense import as_stored
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import Settings, expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

_AFFINE = "affine"
_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mode:
    """How codes are read. group, bits: those of a module that says none of its own."""

    group: int
    bits: int
    format: str = ""


_MODES = {
    _AFFINE: _Mode(group=64, bits=4),
    "mxfp4": _Mode(group=32, bits=4, format="f4_e2m1"),
    "mxfp8": _Mode(group=32, bits=8, format="f8_e4m3"),
    "nvfp4": _Mode(group=16, bits=4, format="f4_e2m1"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parameters:
    """What the config says of one module."""

    mode: str
    group: int
    bits: int


class MLXFormat:
    name = "mlx"
    encodings: Mapping[str, str] = {
        **{f"mlx:{bits}": f"affine:{bits}/64" for bits in _AFFINE_BITS},
        "mlx:mxfp4": "float:f4_e2m1/32",
        "mlx:mxfp8": "float:f8_e4m3/32",
        "mlx:nvfp4": "float:f4_e2m1/16",
    }

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        return settings is not None and settings.method == self.name

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        settings = expect_method(files, self.name, frozenset({self.name, ""}))
        modules = [
            name.removesuffix(".scales")
            for name in files.tensors
            if name.endswith(".scales")
            and f"{name.removesuffix('.scales')}.weight" in files.tensors
        ]
        if settings is None or not modules:
            raise ModelError(
                f"{files.path} has no quantization in its config.json, or no tensors NAME.weight "
                "with NAME.scales, which mlx stores. "
                "Leave --quantization out, so that the format is found from the files."
            )
        parts = {f"{name}.{part}" for name in modules for part in ("weight", "scales", "biases")}
        tensors = as_stored(files, (name for name in files.tensors if name not in parts))
        for name in modules:
            parameters = _parameters(files, settings, name)
            info = _info(files, name, parameters)
            tensors[info.name] = LogicalTensor(
                info=info, read=functools.partial(_read, files, name, info.shape, parameters)
            )
        return tensors


def _parameters(files: SafetensorsDirectory, settings: Settings, name: str) -> _Parameters:
    """The parameters of a module: its own, or those of the model."""
    fields = settings.fields
    own: Fields = fields.section(name) if fields.is_section(name) else fields
    if own is fields and not fields.flag(name, default=True):
        raise refuse(
            files, f"{name}.scales", "is there, though config.json says that it is not quantised"
        )
    mode = own.text("mode", default=_AFFINE)
    if mode not in _MODES:
        raise own.refuse("mode", f"one of {', '.join(_MODES)}")
    usual = _MODES[mode]
    bits = own.integer("bits", low=1, high=64, default=usual.bits)
    group = own.integer("group_size", default=usual.group)
    if bits not in (_AFFINE_BITS if mode == _AFFINE else (usual.bits,)):
        raise own.refuse("bits", "2, 3, 4, 5, 6 or 8" if mode == _AFFINE else str(usual.bits))
    if group not in (_AFFINE_GROUPS if mode == _AFFINE else (usual.group,)):
        raise own.refuse(
            "group_size", "16, 32, 64, 128 or 256" if mode == _AFFINE else str(usual.group)
        )
    return _Parameters(mode=mode, group=group, bits=bits)


def _info(files: SafetensorsDirectory, name: str, parameters: _Parameters) -> TensorInfo:
    """One matrix, or stack of matrices, held against its parameters."""
    affine = parameters.mode == _AFFINE
    codes = stored(files, f"{name}.weight", types=("U32",))
    if not 2 <= len(codes.shape) <= 3:
        raise refuse(files, codes.name, f"has shape {list(codes.shape)}, which is no matrix")
    *rows, words = codes.shape
    columns, rest = divmod(32 * words, parameters.bits)
    if rest or columns % parameters.group:
        raise refuse(
            files,
            codes.name,
            f"has {words} words a row, which are no groups of {parameters.group} codes of "
            f"{parameters.bits} bits, as config.json has it",
        )
    scales = (*rows, columns // parameters.group)
    taken = [
        codes,
        stored(files, f"{name}.scales", types=SCALE_TYPES if affine else ("U8",), shape=scales),
    ]
    if affine:
        taken.append(stored(files, f"{name}.biases", types=SCALE_TYPES, shape=scales))
    return TensorInfo(
        name=codes.name,
        type=f"mlx:{parameters.bits if affine else parameters.mode}",
        shape=(*rows, columns),
        nbytes=sum(part.nbytes for part in taken),
    )


def _read(
    files: SafetensorsDirectory, name: str, shape: tuple[int, ...], parameters: _Parameters
) -> Weight:
    codes = files.array(f"{name}.weight").view(np.uint8)
    if parameters.mode == _AFFINE:
        return GroupAffine(
            shape=shape,
            bits=parameters.bits,
            group=parameters.group,
            codes=codes,
            scale=finite(files, f"{name}.scales"),
            bias=finite(files, f"{name}.biases"),
        )
    table = E8M0
    if parameters.mode == "nvfp4":
        table = FLOAT_TABLES["f8_e4m3"].astype(np.float16)
    scale = table[files.array(f"{name}.scales")]
    if not np.isfinite(scale).all():
        raise refuse(files, f"{name}.scales", "holds numbers that are not finite")
    if parameters.bits == 8 and ((codes & 0x7F) == 0x7F).any():
        raise refuse(files, f"{name}.weight", "holds numbers that are not finite")
    return GroupFloat(
        shape=shape,
        format=_MODES[parameters.mode].format,
        group=parameters.group,
        codes=codes,
        scale=scale,
    )
