"""bitsandbytes checkpoints, as transformers saves them: nf4, fp4 and LLM.int8.

4 bits: a parameter `NAME.weight` is codes in pairs, the first in a byte's upper half, of all its
elements in order of rows; `NAME.weight.quant_state.bitsandbytes__nf4` (or `fp4`) is a JSON text
with its shape and block size; `NAME.weight.quant_map` `[16]` is what codes stand for;
`NAME.weight.absmax` the scale of each block of elements. Scales may be bytes themselves:
`nested_quant_map[byte] * nested_absmax[block of bytes] + nested_offset`.

8 bits: `NAME.weight` is int8 `[N, K]`, an element `weight * SCB / 127` with `NAME.SCB` `[N]`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Float32, GroupAffine, GroupFloat, Weight
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import TensorInfo, shown
from polysilicon.weights.formats.affine import fitting_group
from polysilicon.weights.formats.checks import SCALE_TYPES, finite, refuse, stored
from polysilicon.weights.formats.dense import as_stored
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory, parse_object

Codes = npt.NDArray[np.uint8]

_FOUR_BIT_TYPES = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_STATE_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MAX_STATE_BYTES = 1 << 16
# Bytes may be stored as if they were numbers of another type, so that FSDP can shard them.
_STORAGE = ("U8", "I8", "F16", "BF16", "F32")
_MAX_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parameter:
    """One parameter of 4 bits. block: elements of a scale; group: those of one in the encoding.

    nested_block: scales of a scale of scales, 0 where scales are plain.
    """

    name: str
    shape: tuple[int, ...]
    block: int
    group: int
    nested_block: int
    nested_offset: float


class BitsAndBytesFormat:
    name = "bitsandbytes"
    encodings: Mapping[str, str] = {
        **{f"bitsandbytes:{kind}": "float:codebook/64" for kind in _FOUR_BIT_TYPES},
        "bitsandbytes:int8": "affine:8/row",
    }

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        return settings is not None and settings.method == self.name

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        expect_method(files, self.name, frozenset({self.name}))
        quantized: dict[str, LogicalTensor] = {}
        parts: set[str] = set()
        for name in files.tensors:
            parameter, found, kind = name.partition(_STATE)
            if found:
                tensor, taken = _four_bit(files, parameter, kind)
            elif name.endswith(".SCB"):
                tensor, taken = _eight_bit(files, name.removesuffix(".SCB"))
            else:
                continue
            if tensor.info.name in quantized:
                raise refuse(files, tensor.info.name, "is quantised in two ways")
            quantized[tensor.info.name] = tensor
            parts |= taken
        if not quantized:
            raise ModelError(
                f"{files.path} has neither a tensor NAME.SCB nor NAME{_STATE}nf4 or fp4, which "
                f"{self.name} stores. "
                "Leave --quantization out, so that the format is found from the files."
            )
        return {
            **as_stored(files, (name for name in files.tensors if name not in parts)),
            **quantized,
        }


def _four_bit(files: SafetensorsDirectory, name: str, kind: str) -> tuple[LogicalTensor, set[str]]:
    """A parameter of 4 bits, and the names of the stored tensors that it is made of."""
    state_name = f"{name}{_STATE}{kind}"
    if kind not in _FOUR_BIT_TYPES:
        raise refuse(
            files, state_name, f"is of type {shown(kind)}; {' and '.join(_FOUR_BIT_TYPES)} are read"
        )
    parameter = _parameter(files, name, _state(files, state_name))
    parts = {name, state_name} | {
        f"{name}.{part}" for part in _STATE_PARTS if f"{name}.{part}" in files.tensors
    }
    info = TensorInfo(
        name=name,
        type=f"bitsandbytes:{kind}",
        shape=parameter.shape,
        nbytes=sum(files.tensors[part].nbytes for part in parts),
    )
    read = functools.partial(_read_four_bit, files, parameter)
    return LogicalTensor(info=info, read=read), parts


def _state(files: SafetensorsDirectory, name: str) -> Fields:
    """The JSON of a quantisation state."""
    if stored(files, name, types=("U8",), shape=(None,)).nbytes > _MAX_STATE_BYTES:
        raise refuse(files, name, f"has more than {_MAX_STATE_BYTES} bytes")
    source = f"{files.path}: tensor {shown(name)}"
    return Fields(parse_object(source, files.array(name).tobytes()), source)


def _parameter(files: SafetensorsDirectory, name: str, state: Fields) -> _Parameter:
    shape = tuple(state.integers("shape", high=1 << 32))
    if not 2 <= len(shape) <= 3 or 0 in shape:
        raise state.refuse("shape", "2 or 3 sizes")
    count = math.prod(shape)
    codes = stored(files, name, types=_STORAGE)
    if shape[-1] % 2 or 2 * codes.nbytes != count:
        raise refuse(
            files, name, f"has {codes.nbytes} bytes, which are no pairs of codes of {list(shape)}"
        )
    block = _block(state, "blocksize")
    # Where blocks cross rows, a smaller group does not.
    group = fitting_group(shape[-1], math.gcd(shape[-1], block))
    if group is None:
        raise refuse(files, name, f"has rows of {shape[-1]}, which cross its blocks of {block}")
    stored(files, f"{name}.quant_map", types=SCALE_TYPES, shape=(16,))
    blocks = -(-count // block)
    nested = f"{name}.nested_absmax" in files.tensors
    nested_block = _block(state, "nested_blocksize") if nested else 0
    stored(files, f"{name}.absmax", types=("U8",) if nested else SCALE_TYPES, shape=(blocks,))
    if nested:
        stored(files, f"{name}.nested_quant_map", types=SCALE_TYPES, shape=(256,))
        shape_of_nested = (-(-blocks // nested_block),)
        stored(files, f"{name}.nested_absmax", types=SCALE_TYPES, shape=shape_of_nested)
    return _Parameter(
        name=name,
        shape=shape,
        block=block,
        group=group,
        nested_block=nested_block,
        nested_offset=state.number("nested_offset", low=-1e30, default=0.0) if nested else 0.0,
    )


def _block(state: Fields, name: str) -> int:
    size = state.integer(name, low=1, high=1 << 62)
    if not 16 <= size <= _MAX_BLOCK or size & (size - 1):
        raise state.refuse(name, f"a power of two from 16 to {_MAX_BLOCK}")
    return size


def _read_four_bit(files: SafetensorsDirectory, parameter: _Parameter) -> Weight:
    *rows, columns = parameter.shape
    pairs: Codes = files.array(parameter.name).reshape(-1).view(np.uint8)
    codes: Codes = pairs >> np.uint8(4) | pairs << np.uint8(4)
    groups = (*rows, columns // parameter.group)
    starts = np.arange(math.prod(groups)) * parameter.group
    return GroupFloat(
        shape=parameter.shape,
        format="codebook",
        group=parameter.group,
        codes=codes.reshape(*rows, columns // 2),
        scale=_scales(files, parameter)[starts // parameter.block].reshape(groups),
        table=finite(files, f"{parameter.name}.quant_map").astype(np.float32),
    )


def _scales(files: SafetensorsDirectory, parameter: _Parameter) -> Float32:
    """The scale of each block."""
    name = parameter.name
    if not parameter.nested_block:
        return finite(files, f"{name}.absmax").astype(np.float32)
    values = finite(files, f"{name}.nested_quant_map").astype(np.float32)
    steps = finite(files, f"{name}.nested_absmax").astype(np.float32)
    codes = files.array(f"{name}.absmax")
    steps = np.repeat(steps, parameter.nested_block)[: len(codes)]
    return values[codes] * steps + np.float32(parameter.nested_offset)


def _eight_bit(files: SafetensorsDirectory, module: str) -> tuple[LogicalTensor, set[str]]:
    """A matrix of 8 bits, and the names of the stored tensors that it is made of."""
    name, scale_name, layout = (f"{module}.{part}" for part in ("weight", "SCB", "weight_format"))
    codes = stored(files, name, types=("I8",), shape=(None, None))
    scales = stored(files, scale_name, types=SCALE_TYPES, shape=(codes.shape[0],))
    parts = {name, scale_name}
    nbytes = codes.nbytes + scales.nbytes
    if layout in files.tensors:
        stored(files, layout, types=("U8", "I64"), shape=())
        if files.array(layout) != 0:
            raise refuse(files, layout, "names a layout for one kind of GPU; rows are read")
        parts.add(layout)
        nbytes += files.tensors[layout].nbytes

    def read() -> Weight:
        scale = finite(files, scale_name).astype(np.float32) * np.float32(1 / 127)
        return GroupAffine(
            shape=codes.shape,
            bits=8,
            group=codes.shape[1],
            codes=files.array(name).view(np.uint8) ^ np.uint8(0x80),
            scale=scale[:, None],
            offset=128,
        )

    info = TensorInfo(name=name, type="bitsandbytes:int8", shape=codes.shape, nbytes=nbytes)
    return LogicalTensor(info=info, read=read), parts
