"""HQQ checkpoints, as transformers saves them.

A linear `NAME` is `NAME.W_q`, codes of the matrix reshaped to `[N * K / group, group]` (`axis` 1)
or `[group, N * K / group]` (`axis` 0) and packed along the first axis: the tensor is cut into equal
parts of rows, which stand in a word from its highest bits down. `NAME.scale` and `NAME.zero` are
floats, one for each row of the first shape or column of the second. An element is
`(code - zero) * scale`. What the packing was stands in small tensors beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Array, Dense, Weight, pack_codes
from polysilicon.weights.files import TensorInfo, shown
from polysilicon.weights.formats.affine import fitting_group, zero_point_weight
from polysilicon.weights.formats.checks import SCALE_TYPES, finite, refuse, stored
from polysilicon.weights.formats.dense import as_stored
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import expect_method, stated_settings
from polysilicon.weights.safetensors import TENSOR_TYPES, SafetensorsDirectory

_PARTS = frozenset({
    "W_q", "scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype",
    "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
})  # fmt: skip
_ACROSS = "axis0"
_COUNTS = ("I32", "I64", "U8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Packing:
    """bits: of a code in its word. word: its dtype. count: codes of a word."""

    bits: int
    word: str
    count: int
    numbers: tuple[float, ...]


_PACKINGS = {
    "8bit_u8": _Packing(bits=8, word="u1", count=1, numbers=(5, 6, 8)),
    "4bit_u8": _Packing(bits=4, word="u1", count=2, numbers=(4,)),
    "3bit_32": _Packing(bits=3, word="<u4", count=10, numbers=(3,)),
    "2bit_u8": _Packing(bits=2, word="u1", count=4, numbers=(1.58, 2)),
    "1bit_u8": _Packing(bits=1, word="u1", count=8, numbers=(1,)),
}
"""By name. numbers: the `nbits` that are packed so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Module:
    """One linear. frame: what the matrix was reshaped to. bits: of its codes in the encoding.
    group: elements of one scale. across: whether a scale belongs to several outputs (`axis` 0)."""

    name: str
    shape: tuple[int, int]
    frame: tuple[int, int]
    packing: _Packing
    bits: int
    group: int
    across: bool


class HQQFormat:
    name = "hqq"
    encodings: Mapping[str, str] = {
        **{f"hqq:{bits}": f"affine:{max(bits, 2)}/64" for bits in (1, 2, 3, 4, 5, 6, 8)},
        f"hqq:{_ACROSS}": "dense:f16",
    }

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        return settings is not None and settings.method == self.name

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        expect_method(files, self.name, frozenset({self.name}))
        names = [name.removesuffix(".W_q") for name in files.tensors if name.endswith(".W_q")]
        if not names:
            raise ModelError(
                f"{files.path} has no tensor NAME.W_q, which {self.name} stores. "
                "Leave --quantization out, so that the format is found from the files."
            )
        parts = {f"{name}.{part}" for name in names for part in _PARTS}
        tensors = as_stored(files, (name for name in files.tensors if name not in parts))
        for name in names:
            module = _module(files, name)
            own = (f"{name}.{part}" for part in _PARTS)
            info = TensorInfo(
                name=f"{name}.weight",
                type=f"hqq:{_ACROSS if module.across else min(module.bits, module.packing.bits)}",
                shape=module.shape,
                nbytes=sum(files.tensors[part].nbytes for part in own if part in files.tensors),
            )
            if info.name in tensors:
                raise refuse(files, info.name, "is stored both plain and quantised")
            tensors[info.name] = LogicalTensor(
                info=info, read=functools.partial(_read, files, module)
            )
        return tensors


def _number(files: SafetensorsDirectory, name: str, default: float) -> float:
    """A number that is stored as a tensor of its own."""
    if name not in files.tensors:
        return default
    stored(files, name, types=(*_COUNTS, "F32"), shape=())
    return float(files.array(name))


def _module(files: SafetensorsDirectory, name: str) -> _Module:
    """One linear, held against what is said of it."""
    for part, meaning in (("quant_scale", "scales"), ("quant_zero", "zero points")):
        if _number(files, f"{name}.{part}", 0):
            raise refuse(files, f"{name}.{part}", f"says that {meaning} are codes themselves")
    if not _number(files, f"{name}.channel_wise", 1):
        raise refuse(files, f"{name}.channel_wise", "says that there is one scale for all")
    shape_name = f"{name}.shape"
    stored(files, shape_name, types=_COUNTS, shape=(2,))
    rows, columns = map(int, files.array(shape_name))
    if not (1 <= rows <= 1 << 32 and 1 <= columns <= 1 << 32):
        raise refuse(files, shape_name, f"holds {rows} and {columns}, which is no shape")
    packing, bits = _packing(files, name)
    axis = _number(files, f"{name}.axis", 1)
    if axis not in (0, 1):
        raise refuse(files, f"{name}.axis", "is neither 0 nor 1")
    length = _number(files, f"{name}.group_size", columns if axis else rows)
    size = int(length) if math.isfinite(length) else 0
    if size < 1 or rows * columns % size:
        raise refuse(
            files, f"{name}.group_size", f"is {length:g}, which does not divide the matrix"
        )
    other = rows * columns // size
    frame = (other, size) if axis else (size, other)
    _check_parts(files, name, packing, frame, (other, 1) if axis else (1, other))
    # Where groups cross rows, smaller ones do not.
    group = fitting_group(columns, math.gcd(columns, size))
    if group is None and axis:
        raise refuse(files, f"{name}.W_q", f"has rows of {columns}, which cross groups of {size}")
    return _Module(
        name=name,
        shape=(rows, columns),
        frame=frame,
        packing=packing,
        bits=bits,
        group=size,
        across=not axis,
    )


def _packing(files: SafetensorsDirectory, name: str) -> tuple[_Packing, int]:
    """How codes are packed, and the bits of one."""
    part = f"{name}.packing"
    stored(files, part, types=("U8",), shape=(None,))
    text = files.array(part)[:64].tobytes().decode("latin-1")
    packing = _PACKINGS.get(text)
    if packing is None:
        raise refuse(files, part, f"is {shown(text)}; {', '.join(_PACKINGS)} are read")
    number = _number(files, f"{name}.nbits", packing.numbers[-1])
    if not any(math.isclose(number, known, rel_tol=1e-6) for known in packing.numbers):
        raise refuse(files, f"{name}.nbits", f"is {number:g}, which is not packed as {text}")
    return packing, max(2, int(number) if packing.bits == 8 else packing.bits)


def _check_parts(
    files: SafetensorsDirectory,
    name: str,
    packing: _Packing,
    frame: tuple[int, int],
    scales: tuple[int, int],
) -> None:
    viewed = bool(_number(files, f"{name}.view_as_float", 0))
    word = np.dtype(packing.word).itemsize
    info = stored(
        files,
        f"{name}.W_q",
        types=TENSOR_TYPES if viewed else ("U8",) if word == 1 else ("I32",),
        shape=(None, None),
    )
    # Only words of ten codes are padded.
    whole = frame[0] % packing.count == 0 or packing.count == 10
    packed_rows = -(-frame[0] // packing.count)
    if not whole or info.shape[0] != packed_rows or info.nbytes != packed_rows * frame[1] * word:
        raise refuse(
            files, info.name, f"has shape {list(info.shape)}, which are no codes of {list(frame)}"
        )
    for part in ("scale", "zero"):
        stored(files, f"{name}.{part}", types=SCALE_TYPES, shape=scales)


def _read(files: SafetensorsDirectory, module: _Module) -> Weight:
    codes = _codes(files, module)
    scale, zero = (finite(files, f"{module.name}.{part}") for part in ("scale", "zero"))
    if module.across:
        # As HQQ computes it: in the dtype of the scales, rounded twice.
        with np.errstate(over="ignore"):
            values = (codes.astype(scale.dtype) - zero.astype(scale.dtype)) * scale
        if not np.isfinite(values).all():
            raise refuse(files, f"{module.name}.scale", "is too large for its own dtype")
        return Dense(array=values.reshape(module.shape))
    rows, columns = module.shape
    group = fitting_group(columns, math.gcd(columns, module.group))
    assert group is not None
    starts = np.arange(rows * columns // group) * group // module.group
    scale, zero = (part[starts, 0].reshape(rows, columns // group) for part in (scale, zero))
    return zero_point_weight(
        shape=module.shape,
        bits=module.bits,
        group=group,
        codes=pack_codes(codes.reshape(module.shape), module.bits),
        scale=scale,
        zeros=zero,
    )


def _codes(files: SafetensorsDirectory, module: _Module) -> npt.NDArray[np.uint8]:
    """Codes uint8 of the frame."""
    packing, name = module.packing, f"{module.name}.W_q"
    words: Array = files.array(name).view(packing.word)
    parts = [
        (words >> words.dtype.type(packing.bits * place)).astype(np.uint8)
        for place in reversed(range(packing.count))
    ]
    codes = np.concatenate(parts)[: module.frame[0]] & np.uint8((1 << packing.bits) - 1)
    if int(codes.max()) >= 1 << module.bits:
        raise refuse(files, name, f"holds codes of more than {module.bits} bits")
    return codes
