"""What formats of 8-bit and 4-bit floats share: their scales, and the weights that come of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np

from polysilicon.weights.encodings import E8M0, Array, GroupFloat
from polysilicon.weights.formats.affine import LEAST_GROUP, fitting_group
from polysilicon.weights.formats.checks import SCALE_TYPES, finite, refuse, stored
from polysilicon.weights.safetensors import SafetensorsDirectory

Reader = Callable[[], GroupFloat]

FP8_FORMATS = {"F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2"}
"""Stored types of weights, with the canonical names of their tables."""

EXPONENT_TYPES = ("U8", "F8_E8M0")
"""Stored types of scales that are powers of two (e8m0)."""

FP8_BLOCK = (128, 128)
"""The 2-D blocks that share a scale where nothing else is said."""

NVFP4_GROUP, MX_GROUP = 16, 32
"""Inputs that share a scale."""

# The values of e2m3 by code: sign, 2 bits of exponent, 3 of mantissa.
_E2M3 = np.arange(64, dtype=np.uint8).view(ml_dtypes.float6_e2m3fn).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleLayout:
    """How scales lie over a matrix `[N, K]`.

    group: inputs that share one, K for whole rows. block: of 2-D blocks, else None. single: whether
    one is for the whole matrix.
    """

    group: int
    block: tuple[int, int] | None = None
    single: bool = False


def scale_layout(
    files: SafetensorsDirectory,
    name: str,
    shape: tuple[int, int],
    *,
    types: tuple[str, ...] = SCALE_TYPES,
    group: int | None = None,
    block: tuple[int, int] | None = None,
) -> ScaleLayout:
    """What the shape of a stored tensor of scales says: one for a matrix of `shape`, one for each
    output, for each `block` (as a matrix, or as `[.., 1, .., 1]`), or for each `group` inputs of an
    output. Raises ModelError where it is none of them.
    """
    rows, columns = shape
    found = stored(files, name, types=types).shape
    blocks = None if block is None else (-(-rows // block[0]), -(-columns // block[1]))
    if blocks is not None and found in (blocks, (blocks[0], 1, blocks[1], 1)):
        return ScaleLayout(group=columns, block=block)
    if group is not None and columns % group == 0 and found == (rows, columns // group):
        if fitting_group(columns, group) is None:
            raise refuse(
                files, name, f"is for groups of {group} inputs; at least {LEAST_GROUP} are read"
            )
        return ScaleLayout(group=group)
    if math.prod(found) == 1:
        return ScaleLayout(group=columns, single=True)
    if found in ((rows,), (rows, 1)):
        return ScaleLayout(group=columns)
    fitting = ["one number", f"[{rows}, 1]"]
    if blocks is not None:
        fitting.append(str(list(blocks)))
    if group is not None:
        fitting.append(f"[{rows}, {columns}/{group}]")
    raise refuse(
        files,
        name,
        f"has shape {list(found)}, which does not fit a weight of shape {list(shape)}: expected "
        f"{' or '.join(fitting)}",
    )


def scales(files: SafetensorsDirectory, name: str, layout: ScaleLayout, rows: int) -> Array:
    """Stored scales in their own dtype, powers of two in bf16, as a weight of `rows` outputs has
    them: `[N, K / group]`, or by blocks.

    Raises ModelError for NaN and infinity, and for negative scales.
    """
    if files.tensors[name].type in EXPONENT_TYPES:
        values = exponents(files, name)
    else:
        values = _not_negative(files, name)
    if layout.block is not None:
        return values.reshape(-(-rows // layout.block[0]), -1)
    if layout.single:
        return np.full((rows, 1), values.reshape(-1)[0], values.dtype)
    return values.reshape(rows, -1)


def exponents(files: SafetensorsDirectory, name: str) -> Array:
    """A stored tensor of e8m0 codes as numbers, bf16. Raises ModelError for NaN."""
    codes = files.array(name).view(np.uint8)
    if (codes == 255).any():
        raise refuse(files, name, "holds scales that are NaN")
    return E8M0[codes]


def input_scale(files: SafetensorsDirectory, name: str) -> float | None:
    """A static scale of activations: None where it is not stored, or 0, as calibration leaves it
    for experts that it never reached."""
    if name not in files.tensors:
        return None
    return float(_one_number(files, name)) or None


def fp8_reader(
    files: SafetensorsDirectory,
    weight: str,
    scale: str,
    *,
    group: int | None = None,
    block: tuple[int, int] | None = None,
    static: str = "",
) -> Reader:
    """Reads a stored matrix of fp8 under scales as `scale_layout` takes them, once it is checked.

    static: the tensor of the static scale of activations, which need not be there.
    """
    shape = stored(files, weight, types=tuple(FP8_FORMATS), shape=(None, None)).shape
    layout = scale_layout(
        files,
        scale,
        (shape[0], shape[1]),
        types=(*SCALE_TYPES, *EXPONENT_TYPES),
        group=group,
        block=block,
    )
    return functools.partial(_read_fp8, files, weight, scale, layout, static)


def _read_fp8(
    files: SafetensorsDirectory, weight: str, scale: str, layout: ScaleLayout, static: str
) -> GroupFloat:
    info = files.tensors[weight]
    group = fitting_group(info.shape[1], layout.group)
    assert group is not None
    values = scales(files, scale, layout, info.shape[0])
    if group != layout.group:
        values = np.repeat(values, layout.group // group, axis=-1)
    return GroupFloat(
        shape=info.shape,
        format=FP8_FORMATS[info.type],
        group=group,
        codes=files.array(weight).view(np.uint8),
        scale=values,
        block=layout.block,
        input_scale=input_scale(files, static),
    )


def mxfp4_reader(files: SafetensorsDirectory, weight: str, scale: str) -> Reader:
    """Reads packed e2m1 `[N, K / 2]` under e8m0 scales `[N, K / 32]`, once they are checked."""
    rows, columns = _packed_shape(files, weight, MX_GROUP)
    stored(files, scale, types=EXPONENT_TYPES, shape=(rows, columns // MX_GROUP))
    return lambda: fp4_weight(files.array(weight), exponents(files, scale))


def mxfp6_reader(files: SafetensorsDirectory, weight: str, scale: str) -> Reader:
    """Reads e2m3 codes of 6 bits, each row a stream `[N, K * 6 / 8]`, under e8m0 scales
    `[N, K / 32]`, once they are checked."""
    rows, size = stored(files, weight, types=("U8",), shape=(None, None)).shape
    groups, rest = divmod(size * 8, 6 * MX_GROUP)
    if rest:
        raise refuse(files, weight, f"has rows of {size} bytes, no groups of {MX_GROUP} codes")
    stored(files, scale, types=EXPONENT_TYPES, shape=(rows, groups))
    return lambda: GroupFloat(
        shape=(rows, groups * MX_GROUP),
        format="codebook",
        group=MX_GROUP,
        codes=files.array(weight),
        scale=exponents(files, scale),
        table=_E2M3,
    )


def nvfp4_reader(
    files: SafetensorsDirectory, weight: str, scale: str, factor: str, *, divisor: bool
) -> Reader:
    """Reads packed e2m1 `[N, K / 2]` under e4m3 scales `[N, K / 16]`, once they are checked.

    factor: one number by which all scales are multiplied, or divided where it is a `divisor`.
    """
    rows, columns = _packed_shape(files, weight, NVFP4_GROUP)
    stored(files, scale, types=("F8_E4M3",), shape=(rows, columns // NVFP4_GROUP))
    _check_one_number(files, factor)
    return functools.partial(_read_nvfp4, files, weight, scale, factor, divisor)


def _read_nvfp4(
    files: SafetensorsDirectory, weight: str, scale: str, factor: str, divisor: bool
) -> GroupFloat:
    codes, number = _not_negative(files, scale).astype(np.float32), _one_number(files, factor)
    with np.errstate(all="ignore"):
        values = codes / number if divisor else codes * number
    if not np.isfinite(values).all():
        raise refuse(files, factor, f"is {number}, with which scales are not finite")
    return fp4_weight(files.array(weight), values)


def fp4_weight(codes: Array, scale: Array) -> GroupFloat:
    """Packed e2m1, uint8 `[..., N, K / 2]`, the lower half first, under scales `[..., N, G]`."""
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    return GroupFloat(
        shape=shape,
        format="f4_e2m1",
        group=shape[-1] // scale.shape[-1],
        codes=codes,
        scale=scale,
    )


def _packed_shape(files: SafetensorsDirectory, name: str, group: int) -> tuple[int, int]:
    """(N, K) of packed fp4; K must be whole groups."""
    rows, half = stored(files, name, types=("U8",), shape=(None, None)).shape
    if 2 * half % group:
        raise refuse(files, name, f"has {2 * half} inputs, no multiple of a group's {group}")
    return rows, 2 * half


def _check_one_number(files: SafetensorsDirectory, name: str) -> None:
    if math.prod(stored(files, name, types=SCALE_TYPES).shape) != 1:
        raise refuse(files, name, f"has shape {list(files.tensors[name].shape)}, expected 1 number")


def _one_number(files: SafetensorsDirectory, name: str) -> np.float32:
    _check_one_number(files, name)
    return np.float32(_not_negative(files, name).reshape(-1)[0])


def _not_negative(files: SafetensorsDirectory, name: str) -> Array:
    values = finite(files, name)
    if (values < 0).any():
        raise refuse(files, name, "holds negative scales")
    return values
