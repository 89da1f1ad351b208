"""compressed-tensors checkpoints, as llm-compressor writes them for vLLM.

A quantised linear of N outputs and K inputs has `weight_scale` and one of
- `weight_packed` int32 and `weight_shape`, integers of 2 to 8 bits: each row a stream of K codes,
  lowest bit first, in words; an element is `scale * (code - zero)`, both codes and zero points
  raised by half their range. `weight_zero_point` int32 `[N * bits / 32, G]` is packed along N.
  Versions before 0.12 let no code of 3, 5, 6 or 7 bits straddle two words;
- `weight` int8, and perhaps `weight_zero_point` int8;
- `weight` e4m3, under scales of numbers, or of e8m0 by 32 inputs (mxfp8);
- `weight_packed` uint8 of e2m3, each row a stream of codes, under e8m0 by 32 inputs (mxfp6);
- `weight_packed` uint8 of e2m1, under e8m0 by 32 inputs (mxfp4), or under e4m3 by 16 that
  `weight_global_scale` divides (nvfp4, whose scales are rounded to float32).
Scales are one for the matrix, or `[N, 1]`, `[N, G]`, or of 2-D blocks. `weight_g_idx` `[K]` says
the group of each input. `input_scale` is a static scale of activations. Where only KV is quantised,
weights are as they were; its scales are read by `polysilicon.models.kv_scales`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Array, Weight, pack_codes, unpack_codes
from polysilicon.weights.files import TensorInfo
from polysilicon.weights.formats.affine import order_by_group, zero_point_weight
from polysilicon.weights.formats.checks import SCALE_TYPES, finite, refuse, stored
from polysilicon.weights.formats.compressed_tensors_config import Scheme, read_schemes
from polysilicon.weights.formats.dense import as_stored, code_tensor
from polysilicon.weights.formats.floats import (
    EXPONENT_TYPES,
    ScaleLayout,
    fp8_reader,
    input_scale,
    mxfp4_reader,
    mxfp6_reader,
    nvfp4_reader,
    scale_layout,
)
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.kv_scales import quantizes_kv
from polysilicon.weights.formats.settings import expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

Codes = npt.NDArray[np.uint8]

_PACKED, _SCALE = ".weight_packed", ".weight_scale"
_PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    "weight_global_scale", "input_scale", "input_zero_point", "input_global_scale",
)  # fmt: skip


_NAME = "compressed-tensors"


class CompressedTensorsFormat:
    name = _NAME
    encodings: Mapping[str, str] = {
        **{f"{_NAME}:int{bits}": f"affine:{bits}/128" for bits in range(2, 9)},
        f"{_NAME}:fp8": "float:f8_e4m3/row",
        f"{_NAME}:mxfp8": "float:f8_e4m3/32",
        f"{_NAME}:mxfp6": "float:codebook/32",
        f"{_NAME}:nvfp4": "float:f4_e2m1/16",
        f"{_NAME}:mxfp4": "float:f4_e2m1/32",
    }

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        return settings is not None and settings.method == self.name

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        settings = expect_method(files, self.name, frozenset({self.name}))
        if settings is None:
            raise ModelError(
                f"{files.path} has no quantization_config, without which {self.name} cannot be "
                "read. Leave --quantization out, so that the format is found from the files."
            )
        names = dict.fromkeys(
            name.removesuffix(end)
            for end in (_PACKED, _SCALE)
            for name in files.tensors
            if name.endswith(end)
        )
        if not names:
            if quantizes_kv(settings) and code_tensor(files) is None:
                return as_stored(files, files.tensors)
            raise ModelError(
                f"{files.path} has no tensor NAME{_SCALE}, which {self.name} stores. "
                "Use the checkpoint as it was compressed, or the unquantised one."
            )
        schemes = read_schemes(settings.fields, names)
        parts = {f"{name}.{part}" for name in names for part in _PARTS}
        tensors = as_stored(files, (name for name in files.tensors if name not in parts))
        for name in names:
            tensors[f"{name}.weight"] = _module(files, name, schemes.of(name))
        return tensors


def _module(files: SafetensorsDirectory, name: str, scheme: Scheme) -> LogicalTensor:
    """One quantised linear, its stored parts checked."""
    packed, plain, scale = f"{name}{_PACKED}", f"{name}.weight", f"{name}{_SCALE}"
    if packed in files.tensors and plain in files.tensors:
        raise refuse(files, packed, f"is there beside {plain}: one weight is stored once")
    stored(files, scale, types=(*SCALE_TYPES, *EXPONENT_TYPES, "F8_E4M3"))
    exponents = files.tensors[scale].type in EXPONENT_TYPES
    shape: tuple[int, ...]
    read: Callable[[], Weight]
    if scheme.kind == "int":
        integers = _integers(files, name, scheme)
        kind, shape = f"int{scheme.bits}", integers.shape
        read = functools.partial(_read_integers, files, integers)
    elif scheme.bits == 8:
        read = fp8_reader(
            files,
            plain,
            scale,
            group=scheme.group,
            block=scheme.block,
            static=f"{name}.input_scale" if scheme.static else "",
        )
        kind, shape = "mxfp8" if exponents else "fp8", files.tensors[plain].shape
    elif scheme.bits == 6:
        kind, read = "mxfp6", mxfp6_reader(files, packed, scale)
        shape = files.tensors[packed].shape[0], files.tensors[packed].shape[1] * 8 // 6
    else:
        if exponents:
            kind, read = "mxfp4", mxfp4_reader(files, packed, scale)
        else:
            factor = f"{name}.weight_global_scale"
            kind, read = "nvfp4", nvfp4_reader(files, packed, scale, factor, divisor=True)
        rows, half = files.tensors[packed].shape
        shape = rows, 2 * half
    parts = (f"{name}.{part}" for part in _PARTS)
    return LogicalTensor(
        info=TensorInfo(
            name=plain,
            type=f"{_NAME}:{kind}",
            shape=shape,
            nbytes=sum(files.tensors[part].nbytes for part in parts if part in files.tensors),
        ),
        read=read,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Integers:
    """A linear of integers, its stored parts checked. layout: of its scales. static: whether
    `input_scale` is of use."""

    name: str
    shape: tuple[int, int]
    bits: int
    layout: ScaleLayout
    static: bool

    def part(self, end: str) -> str:
        return f"{self.name}.{end}"

    @property
    def groups(self) -> int:
        return self.shape[1] // self.layout.group


def _integers(files: SafetensorsDirectory, name: str, scheme: Scheme) -> _Integers:
    packed = f"{name}{_PACKED}"
    if packed in files.tensors:
        shape = _packed_shape(files, name, scheme.bits)
    else:
        rows, columns = stored(files, f"{name}.weight", types=("I8",), shape=(None, None)).shape
        shape = rows, columns
    layout = scale_layout(files, f"{name}{_SCALE}", shape, group=scheme.group)
    module = _Integers(
        name=name, shape=shape, bits=scheme.bits, layout=layout, static=scheme.static
    )
    _check_zeros(files, module, scheme)
    if module.part("weight_g_idx") in files.tensors:
        stored(files, module.part("weight_g_idx"), types=("I32", "I64"), shape=(shape[1],))
    return module


def _packed_shape(files: SafetensorsDirectory, name: str, bits: int) -> tuple[int, int]:
    """The shape that the file states, held against the words that there are."""
    info = stored(files, f"{name}.weight_shape", types=("I32", "I64"), shape=(2,))
    rows, columns = map(int, files.array(info.name))
    words = stored(files, f"{name}{_PACKED}", types=("I32",), shape=(None, None)).shape
    if rows != words[0] or columns < 1 or words[1] not in _word_counts(columns, bits):
        raise refuse(
            files,
            info.name,
            f"says {[rows, columns]}, but the weight has {words[0]} rows of {words[1]} words, "
            f"which do not hold so many codes of {bits} bits",
        )
    return rows, columns


def _word_counts(codes: int, bits: int) -> tuple[int, int]:
    """Words of a row: where codes straddle them, and where they do not."""
    return -(-codes * bits // 32), -(-codes // (32 // bits))


def _check_zeros(files: SafetensorsDirectory, module: _Integers, scheme: Scheme) -> None:
    name = module.part("weight_zero_point")
    if name not in files.tensors and scheme.symmetric:
        return
    info = stored(files, name, types=("I8", "I32"))
    rows, groups = module.shape[0], module.groups
    fitting: set[tuple[int, ...]]
    if info.type == "I32":
        fitting = {(words, groups) for words in _word_counts(rows, module.bits)}
    elif module.layout.single:
        fitting = {(), (1,), (1, 1)}
    else:
        fitting = {(rows, groups), (rows,)} if groups == 1 else {(rows, groups)}
    if info.shape not in fitting:
        raise refuse(
            files,
            name,
            f"has shape {list(info.shape)} of {info.type}, which are not the zero points of {rows} "
            f"outputs in {groups} groups",
        )


def _read_integers(files: SafetensorsDirectory, module: _Integers) -> Weight:
    rows, _ = module.shape
    order, index = None, module.part("weight_g_idx")
    # Nothing but -1 is what the writer began with.
    if index in files.tensors and (files.array(index) != -1).any():
        order = order_by_group(files, index, module.groups)
    scale = finite(files, module.part("weight_scale"))
    if module.layout.single:
        scale = np.full((rows, 1), scale.reshape(-1)[0], scale.dtype)
    weight = zero_point_weight(
        shape=module.shape,
        bits=module.bits,
        group=module.layout.group,
        codes=_codes(files, module, order),
        scale=scale.reshape(rows, module.groups),
        zeros=_zeros(files, module),
        input_order=order,
    )
    static = input_scale(files, module.part("input_scale")) if module.static else None
    return dataclasses.replace(weight, input_scale=static)


def _codes(
    files: SafetensorsDirectory, module: _Integers, order: npt.NDArray[np.int32] | None
) -> Codes:
    """Raised codes, packed, their columns in this order."""
    columns, bits = module.shape[1], module.bits
    name = module.part("weight_packed")
    if name in files.tensors:
        words = files.array(name)
        straddling, _ = _word_counts(columns, bits)
        if order is None and words.shape[1] == straddling and columns * bits % 8 == 0:
            stream: Codes = words.view(np.uint8)[:, : columns * bits // 8]
            return stream
        codes = _from_words(words, bits, columns)
    else:
        raised = files.array(module.part("weight")) + np.int16(_half(bits))
        if raised.min() < 0 or raised.max() >> bits:
            raise refuse(files, module.part("weight"), f"holds integers of more than {bits} bits")
        codes = raised.astype(np.uint8)
    return pack_codes(codes if order is None else codes.take(order, axis=1), bits)


def _zeros(files: SafetensorsDirectory, module: _Integers) -> Array:
    """Raised zero points, `[N, G]`."""
    rows, groups = module.shape[0], module.groups
    name = module.part("weight_zero_point")
    if name not in files.tensors:
        return np.full((rows, groups), _half(module.bits), np.int16)
    stored_zeros = files.array(name)
    if stored_zeros.dtype == np.int32:
        return _from_words(np.ascontiguousarray(stored_zeros.T), module.bits, rows).T
    raised = stored_zeros + np.int16(_half(module.bits))
    return np.full((rows, 1), raised) if module.layout.single else raised.reshape(rows, groups)


def _half(bits: int) -> int:
    """By how much signed integers are raised to be codes."""
    return 1 << (bits - 1)


def _from_words(words: Array, bits: int, count: int) -> Codes:
    """The first `count` codes of each row of words int32 `[R, W]`: `[R, count]`."""
    straddling, _ = _word_counts(count, bits)
    if words.shape[1] == straddling:
        return unpack_codes(words.view(np.uint8)[:, : -(-count * bits // 8)], bits, count)
    shifts = np.arange(0, 32 // bits * bits, bits, dtype=np.uint32)
    fields = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return fields.astype(np.uint8).reshape(len(words), -1)[:, :count]
