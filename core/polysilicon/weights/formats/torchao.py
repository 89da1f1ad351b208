"""torchao checkpoints, as transformers saves them in safetensors.

The file's metadata has, by name of a parameter (`NAME.weight`), a JSON object with the class of its
tensor (`_type`), the attributes of it (`_data`) and which tensors it is made of
(`_tensor_data_names`): `NAME._weight_qdata`, `NAME._weight_scale` and others. `block_size` says how
many elements of each axis share a scale.

Read are the classes that store codes plainly. `Int8Tensor` and `IntxUnpackedToInt8Tensor`: int8
`[..., N, K]`, `(code - zero_point) * scale`, scales in the shape of the blocks. `Int4Tensor`: two
signed codes a byte `[..., N, K / 2]`, the first in the lower half, `code * scale + zero_point`,
scales `[..., K / group, N]`. `Float8Tensor`: e4m3 `[N, K]`, `code * scale`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import GroupAffine, Weight, pack_codes
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import TensorInfo, shown
from polysilicon.weights.formats.affine import fitting_group, zero_point_weight
from polysilicon.weights.formats.checks import SCALE_TYPES, finite, refuse, stored
from polysilicon.weights.formats.dense import as_stored
from polysilicon.weights.formats.floats import fp8_reader
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory, parse_object

_PLAIN = "Tensor"

REFUSED_LAYOUTS = {
    "Int4TilePackedTo4dTensor": "codes are ordered for one kind of GPU",
    "Int4PlainInt32Tensor": "codes are ordered for one kind of GPU",
    "MXTensor": "scales may be ordered for one kind of GPU",
    "NVFP4Tensor": "scales may be ordered for one kind of GPU",
}
"""Classes of tensors, with why they are not read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parameter:
    """One quantised parameter. said: its metadata. block: elements of each axis of one scale."""

    name: str
    said: Fields
    prefix: str
    parts: tuple[str, ...]
    block: tuple[int, ...]

    def part(self, name: str) -> str:
        return self.prefix + name


class TorchAOFormat:
    name = "torchao"
    encodings: Mapping[str, str] = {
        **{f"torchao:int{bits}": f"affine:{max(bits, 2)}/32" for bits in range(1, 9)},
        "torchao:float8": "float:f8_e4m3/row",
    }

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        return settings is not None and settings.method == self.name

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        expect_method(files, self.name, frozenset({self.name}))
        quantized: dict[str, LogicalTensor] = {}
        parts: set[str] = set()
        for name, text in files.metadata.items():
            # `format` and `tensor_names` are of the file.
            if "." not in name:
                continue
            source = f"{files.path}: metadata of {shown(name)}"
            said = Fields(parse_object(source, text.encode(errors="replace")), source)
            kind = said.text("_type")
            if kind == _PLAIN:
                continue
            if kind not in _OPEN:
                why = REFUSED_LAYOUTS.get(kind, "it is not known")
                raise ModelError(
                    f"{files.path} stores {shown(name)} as torchao's {shown(kind)}, which is not "
                    f"read: {why}. Read are {', '.join(_OPEN)}: quantise the model again so "
                    "(int4_packing_format='plain')."
                )
            parameter = _parameter(files, name, said)
            quantized[name] = _OPEN[kind](files, parameter)
            parts |= {parameter.part(part) for part in parameter.parts}
        if not quantized:
            raise ModelError(
                f"{files.path} has no metadata of quantised tensors in its safetensors, which "
                f"{self.name} writes since version 0.14. Save the model again with a current one."
            )
        plain = as_stored(files, (name for name in files.tensors if name not in parts))
        for name in quantized:
            if name in plain:
                raise refuse(files, name, "is stored both plain and quantised")
        return {**plain, **quantized}


def _parameter(files: SafetensorsDirectory, name: str, said: Fields) -> _Parameter:
    module, _, leaf = name.rpartition(".")
    parts = said.strings("_tensor_data_names")
    prefix = f"{module}._{leaf}_"
    if "act_pre_scale" in parts:
        raise refuse(files, f"{prefix}act_pre_scale", "scales inputs, which is not supported")
    block = said.section("_data").integers("block_size", high=1 << 32)
    if not 2 <= len(block) <= 3 or 0 in block:
        raise said.section("_data").refuse("block_size", "2 or 3 sizes")
    return _Parameter(name=name, said=said, prefix=prefix, parts=tuple(parts), block=tuple(block))


def _logical(
    files: SafetensorsDirectory,
    parameter: _Parameter,
    kind: str,
    shape: tuple[int, ...],
    read: Callable[[], Weight],
) -> LogicalTensor:
    names = map(parameter.part, parameter.parts)
    info = TensorInfo(
        name=parameter.name,
        type=f"torchao:{kind}",
        shape=shape,
        nbytes=sum(files.tensors[name].nbytes for name in names if name in files.tensors),
    )
    return LogicalTensor(info=info, read=read)


def _group(files: SafetensorsDirectory, parameter: _Parameter, shape: tuple[int, ...]) -> int:
    """Inputs of one scale, for a parameter of this shape, which its blocks must divide."""
    if len(shape) != len(parameter.block) or any(
        size % block for size, block in zip(shape, parameter.block, strict=True)
    ):
        raise refuse(
            files,
            parameter.part("qdata"),
            f"is of shape {list(shape)}, which has no blocks of {list(parameter.block)}",
        )
    group = parameter.block[-1]
    if fitting_group(shape[-1], group) is None:
        raise refuse(files, parameter.part("scale"), f"has groups of {group}; at least 16 are read")
    return group


def _blocks(parameter: _Parameter, shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many blocks there are along each axis."""
    return tuple(size // block for size, block in zip(shape, parameter.block, strict=True))


def _open_integers(files: SafetensorsDirectory, parameter: _Parameter) -> LogicalTensor:
    """`Int8Tensor`, and `IntxUnpackedToInt8Tensor` with codes of fewer bits."""
    bits = 8
    if parameter.said.text("_type") != "Int8Tensor":
        names = {f"int{count}": count for count in range(1, 9)}
        target = parameter.said.section("_data").section("target_dtype")
        found = names.get(target.text("_data"))
        if found is None:
            raise target.refuse("_data", "one of int1 to int8")
        bits = found
    shape = stored(files, parameter.part("qdata"), types=("I8",)).shape
    _group(files, parameter, shape)
    blocks = _blocks(parameter, shape)
    stored(files, parameter.part("scale"), types=SCALE_TYPES, shape=blocks)
    if "zero_point" in parameter.parts:
        types = ("I8", *SCALE_TYPES)
        stored(files, parameter.part("zero_point"), types=types, shape=blocks)
    read = functools.partial(_read_integers, files, parameter, bits)
    return _logical(files, parameter, f"int{bits}", shape, read)


def _read_integers(files: SafetensorsDirectory, parameter: _Parameter, bits: int) -> Weight:
    signed, half = files.array(parameter.part("qdata")), 1 << (bits - 1)
    if int(signed.min()) < -half or int(signed.max()) >= half:
        raise refuse(files, parameter.part("qdata"), f"holds codes of more than {bits} bits")
    scale = finite(files, parameter.part("scale"))
    zeros = np.zeros(scale.shape, np.float32)
    if "zero_point" in parameter.parts:
        zeros = finite(files, parameter.part("zero_point")).astype(np.float32)
    for axis, block in enumerate(parameter.block[:-1]):
        scale, zeros = (np.repeat(part, block, axis=axis) for part in (scale, zeros))
    return zero_point_weight(
        shape=signed.shape,
        bits=max(bits, 2),
        group=parameter.block[-1],
        codes=pack_codes(signed.view(np.uint8) + np.uint8(half), max(bits, 2)),
        scale=scale,
        zeros=zeros + np.float32(half),
    )


def _open_int4(files: SafetensorsDirectory, parameter: _Parameter) -> LogicalTensor:
    *rows, pairs = stored(files, parameter.part("qdata"), types=("I8", "U8")).shape
    shape = (*rows, 2 * pairs)
    group = _group(files, parameter, shape)
    if set(parameter.block[:-1]) != {1}:
        raise parameter.said.section("_data").refuse("block_size", "groups of inputs alone")
    scales = (*rows[:-1], shape[-1] // group, rows[-1])
    for part in ("scale", "zero_point"):
        stored(files, parameter.part(part), types=SCALE_TYPES, shape=scales)
    read = functools.partial(_read_int4, files, parameter, shape)
    return _logical(files, parameter, "int4", shape, read)


def _read_int4(
    files: SafetensorsDirectory, parameter: _Parameter, shape: tuple[int, ...]
) -> Weight:
    group = parameter.block[-1]
    fitting = fitting_group(shape[-1], group)
    assert fitting is not None
    scale, bias = (
        np.repeat(
            np.ascontiguousarray(finite(files, parameter.part(part)).swapaxes(-1, -2)),
            group // fitting,
            axis=-1,
        )
        for part in ("scale", "zero_point")
    )
    return GroupAffine(
        shape=shape,
        bits=4,
        group=fitting,
        # Signed halves of bytes, to codes from 0.
        codes=files.array(parameter.part("qdata")).view(np.uint8) ^ np.uint8(0x88),
        scale=scale,
        offset=8,
        bias=bias if bias.any() else None,
    )


def _open_float8(files: SafetensorsDirectory, parameter: _Parameter) -> LogicalTensor:
    name = parameter.part("qdata")
    shape = stored(files, name, types=("F8_E4M3",), shape=(None, None)).shape
    group = _group(files, parameter, shape)
    stored(files, parameter.part("scale"), types=SCALE_TYPES, shape=_blocks(parameter, shape))
    height = parameter.block[0]
    whole = (height, group) == shape
    read = fp8_reader(
        files,
        name,
        parameter.part("scale"),
        group=group if height == 1 else None,
        block=(height, group) if height > 1 and not whole else None,
    )
    return _logical(files, parameter, "float8", shape, read)


_OPEN: dict[str, Callable[[SafetensorsDirectory, _Parameter], LogicalTensor]] = {
    "Int8Tensor": _open_integers,
    "IntxUnpackedToInt8Tensor": _open_integers,
    "Int4Tensor": _open_int4,
    "Float8Tensor": _open_float8,
}
