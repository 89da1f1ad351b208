"""Canonical weights into placed matrices: cut to a shard, repacked, alike neighbours fused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from polysilicon.backend import (
    Dense,
    GroupAffine,
    GroupFloat,
    Shard,
    SuperScaled,
    Weight,
    unpack_codes,
)
from polysilicon.device_checks import shard_window
from polysilicon_torch.placed import (
    BLOCK_ROWS,
    PLANES,
    WHOLE_ROW,
    DenseMatrix,
    Matrix,
    PackedMatrix,
    PlacedScales,
)

Array = npt.NDArray[Any]
Window = tuple[int, int]

# Codes are unpacked to a byte each on the way, and some widths to eight: chunks bound that.
_CHUNK_CODES = 1 << 23

_PLANE_DTYPES = {32: torch.int32, 16: torch.int16, 8: torch.int8}


def place_matrices(
    parts: Sequence[Weight],
    shard: Shard | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keep_codes: bool,
) -> tuple[tuple[Matrix, int], ...]:
    """The parts of a product as matrices, each with the number of consecutive parts that it holds.

    parts: matrices `[N_i, K]` or stacks `[E, N_i, K]` that `check_parts` passed. Neighbours of
    equal encodings become one matrix, their rows concatenated. dtype: of dense values. keep_codes:
    False dequantises everything. Nothing given is kept in use.
    """
    runs: list[list[Matrix]] = []
    for part in parts:
        matrix = _by_row(part, shard, dtype, device, keep_codes)
        if runs and _key(runs[-1][-1]) == _key(matrix):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return tuple((_interleaved(_concatenated(run)), len(run)) for run in runs)


def placed_bytes(
    parts: Sequence[Weight], shard: Shard | None, *, dtype: torch.dtype, keep_codes: bool
) -> int:
    """About what `place_matrices` will take on the device."""
    total = sum(
        part.nbytes
        if keep_codes and _packs(part, shard)
        else math.prod(part.shape) * dtype.itemsize
        for part in parts
    )
    return total // (1 if shard is None else shard.ranks)


def _packs(part: Weight, shard: Shard | None) -> bool:
    """Whether the kernels take a weight's codes as they are: groups of whole sixteens."""
    if not isinstance(part, (GroupAffine, GroupFloat)) or part.bits not in PLANES:
        return False
    columns = shard_window(part.shape[-1], "columns", shard)
    if part.input_order is not None and columns != (0, part.shape[-1]):
        return False
    group = _placed_group(part, columns)
    return group == WHOLE_ROW or group % 16 == 0


def _placed_group(part: GroupAffine | GroupFloat, columns: Window) -> int:
    """The group of the columns cut out: groups begin where the cut does."""
    begin, end = columns
    width = part.group
    if isinstance(part, GroupFloat) and part.block is not None:
        width = part.block[1]
    group = math.gcd(width, begin)
    return WHOLE_ROW if begin // width == (end - 1) // width else group


def _by_row(
    part: Weight, shard: Shard | None, dtype: torch.dtype, device: torch.device, keep_codes: bool
) -> Matrix:
    """One part, cut and repacked; planes `[.., N, 4 * units]` and scales `[.., N, G]` still row by
    row."""
    rows = shard_window(part.shape[-2], "rows", shard)
    columns = shard_window(part.shape[-1], "columns", shard)
    if keep_codes and _packs(part, shard):
        assert isinstance(part, (GroupAffine, GroupFloat))
        if matrix := _packed(part, rows, columns, device):
            return matrix
    array = part.array if isinstance(part, Dense) else part.dequantize()
    cut = array[..., slice(*rows), slice(*columns)]
    return DenseMatrix(values=_tensor(cut, device).to(dtype))


def _packed(
    part: GroupAffine | GroupFloat, rows: Window, columns: Window, device: torch.device
) -> PackedMatrix | None:
    """The part with its codes, None where one of them is not a number: kernels decode none such."""
    group = _placed_group(part, columns)
    shape = (*part.shape[:-2], rows[1] - rows[0], columns[1] - columns[0])
    order = part.input_order
    planes = _planes(part, shape, rows, columns, device)
    if planes is None:
        return None
    common: dict[str, Any] = {
        "shape": shape,
        "bits": part.bits,
        "planes": planes,
        "group": group,
        "scale": _placed_scales(part.scale, part, group, rows, columns, device),
        "input_order": None if order is None else _tensor(order.astype(np.int64), device),
    }
    if isinstance(part, GroupAffine):
        bias = part.bias
        return PackedMatrix(
            format="affine",
            offset=part.offset,
            bias=None if bias is None else _placed_scales(bias, part, group, rows, columns, device),
            **common,
        )
    table = None
    if part.table is not None:
        # A code names any of 2^bits entries; those that a short table lacks are 0.
        table = torch.zeros(1 << part.bits, dtype=torch.float32, device=device)
        table[: len(part.table)] = _tensor(part.table, device)
    return PackedMatrix(format=part.format, table=table, **common)


def _planes(
    part: GroupAffine | GroupFloat,
    shape: tuple[int, ...],
    rows: Window,
    columns: Window,
    device: torch.device,
) -> tuple[torch.Tensor, ...] | None:
    """The bit planes of the codes `[.., N, 4 * units]`, words as `placed` describes them. None
    where an e4m3 code is a NaN."""
    widths = PLANES[part.bits]
    slots = 32 // widths[0]
    width = shape[-1]
    units = -(-width // (4 * slots))
    planes = tuple(
        torch.empty(
            (math.prod(shape[:-1]), 4 * units), dtype=_PLANE_DTYPES[slots * bits], device=device
        )
        for bits in widths
    )
    streams = part.codes.reshape(-1, *part.codes.shape[-2:])[:, slice(*rows)]
    step = max(1, _CHUNK_CODES // part.shape[-1])
    written = 0
    for stack in streams:
        for start in range(0, len(stack), step):
            stream = _tensor(stack[start : start + step], device)
            codes = _unpacked(stream, part.bits, part.shape[-1])[:, slice(*columns)]
            if isinstance(part, GroupFloat) and part.format == "f8_e4m3":
                if bool(((codes & 0x7F) == 0x7F).any()):
                    return None
                codes = torch.where(codes == 0x80, 0, codes)
            codes = torch.nn.functional.pad(codes, (0, 4 * slots * units - width))
            codes = codes.reshape(len(stream), units, slots // 2, 4, 2)
            target = slice(written, written + len(stream))
            lowest = 0
            for bits, plane in zip(widths, planes, strict=True):
                plane[target] = _words(codes, lowest, bits).reshape(len(stream), 4 * units)
                lowest += bits
            written += len(stream)
    return tuple(plane.reshape(*shape[:-1], 4 * units) for plane in planes)


def _words(codes: torch.Tensor, lowest: int, bits: int) -> torch.Tensor:
    """Bits `lowest` to `lowest + bits` of codes uint8 `[R, units, slots / 2, 4, 2]`, as the words
    of a plane, int32 `[R, units, 4]`."""
    rows, units, pairs = codes.shape[:3]
    words = torch.zeros((rows, units, 4), dtype=torch.int32, device=codes.device)
    for half in range(2):
        for pair in range(pairs):
            field = (codes[:, :, pair, :, half] >> lowest) & ((1 << bits) - 1)
            words |= field.to(torch.int32) << ((half * pairs + pair) * bits)
    return words


def _unpacked(stream: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """`unpack_codes` on the device: uint8 `[R, bytes]` to codes uint8 `[R, count]`."""
    if bits == 8:
        return stream
    size = 1 if 8 % bits == 0 else bits
    per_word = 8 * size // bits
    padded = torch.nn.functional.pad(stream, (0, -stream.shape[1] % size))
    parts = padded.reshape(len(stream), -1, size)
    if size == 1:
        words = parts
    else:
        words = torch.zeros((*parts.shape[:2], 1), dtype=torch.int64, device=stream.device)
        for byte in range(size):
            words |= parts[..., byte : byte + 1].to(torch.int64) << (8 * byte)
    shifts = torch.arange(per_word, dtype=words.dtype, device=stream.device) * bits
    codes = ((words >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    return codes.reshape(len(stream), -1)[:, :count]


def _placed_scales(
    scales: Array | SuperScaled,
    part: GroupAffine | GroupFloat,
    group: int,
    rows: Window,
    columns: Window,
    device: torch.device,
) -> PlacedScales:
    """The scales of what is cut out, `[.., N, G]` by groups of `group` inputs."""
    height, width = 1, part.group
    if isinstance(part, GroupFloat) and part.block is not None:
        height, width = part.block
    begin, end = columns
    finer = 1 if group == WHOLE_ROW else width // group
    span = begin * finer // width, -(-end * finer // width)

    def cut(array: Array, finer: int, span: Window) -> torch.Tensor:
        first = rows[0] // height
        chosen = array[..., first : -(-rows[1] // height), :].repeat(height, axis=-2)
        chosen = chosen[..., rows[0] - first * height : rows[1] - first * height, :]
        return _tensor(chosen.repeat(finer, axis=-1)[..., slice(*span)], device)

    if not isinstance(scales, SuperScaled):
        return PlacedScales(values=cut(scales, finer, span))
    codes = unpack_codes(scales.codes, scales.bits, scales.count)
    super_group = scales.group * finer
    if span[0] % super_group:
        super_, super_group = cut(scales.scale, super_group, span), 1
    else:
        super_span = span[0] // super_group, -(-span[1] // super_group)
        super_ = cut(scales.scale, 1, super_span)
    return PlacedScales(
        values=cut(codes, finer, span),
        super=super_,
        super_group=super_group,
        offset=scales.offset,
    )


def _tensor(array: Array, device: torch.device) -> torch.Tensor:
    """A copy on the device, of the same dtype."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(array)).to(device)


def _key(matrix: Matrix) -> tuple[object, ...]:
    """What must be equal for matrices to be one: everything but their rows."""
    if isinstance(matrix, DenseMatrix):
        return ("dense",)
    return (
        matrix.format,
        matrix.bits,
        matrix.group,
        matrix.offset,
        _scales_key(matrix.scale),
        None if matrix.bias is None else _scales_key(matrix.bias),
        *(
            None if tensor is None else tuple(tensor.tolist())
            for tensor in (matrix.table, matrix.input_order)
        ),
    )


def _scales_key(scales: PlacedScales) -> tuple[object, ...]:
    super_dtype = None if scales.super is None else scales.super.dtype
    return (scales.values.dtype, super_dtype, scales.super_group, scales.offset)


def _concatenated(run: Sequence[Matrix]) -> Matrix:
    """One matrix of the rows of several that have equal keys."""
    first = run[0]
    if len(run) == 1:
        return first
    if isinstance(first, DenseMatrix):
        values = [matrix.values for matrix in run if isinstance(matrix, DenseMatrix)]
        return DenseMatrix(values=torch.cat(values, dim=-2))
    parts = [matrix for matrix in run if isinstance(matrix, PackedMatrix)]
    rows = sum(part.shape[-2] for part in parts)
    biases = [part.bias for part in parts if part.bias is not None]
    return dataclasses.replace(
        first,
        shape=(*first.shape[:-2], rows, first.shape[-1]),
        planes=tuple(
            torch.cat(planes, dim=-2)
            for planes in zip(*(part.planes for part in parts), strict=True)
        ),
        scale=_concatenated_scales([part.scale for part in parts]),
        bias=_concatenated_scales(biases) if biases else None,
    )


def _concatenated_scales(scales: Sequence[PlacedScales]) -> PlacedScales:
    supers = [part.super for part in scales if part.super is not None]
    return dataclasses.replace(
        scales[0],
        values=torch.cat([part.values for part in scales], dim=-2),
        super=torch.cat(supers, dim=-2) if supers else None,
    )


def _interleaved(matrix: Matrix) -> Matrix:
    """The layout of `placed`, from planes and scales that lie row by row."""
    if isinstance(matrix, DenseMatrix):
        return matrix
    return dataclasses.replace(
        matrix,
        planes=tuple(
            _in_blocks(plane.unflatten(-1, (-1, 4))).contiguous() for plane in matrix.planes
        ),
        scale=_interleaved_scales(matrix.scale),
        bias=None if matrix.bias is None else _interleaved_scales(matrix.bias),
    )


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """`[.., N, A, C]` to `[.., ceil(N / 8), A, 8, C]`."""
    padding = -rows.shape[-3] % BLOCK_ROWS
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, padding))
    return padded.unflatten(-3, (-1, BLOCK_ROWS)).transpose(-3, -2)


def _interleaved_scales(scales: PlacedScales) -> PlacedScales:
    values = _in_blocks(scales.values[..., None])[..., 0]
    super_ = None if scales.super is None else _in_blocks(scales.super[..., None])[..., 0]
    # Padding rows hold zeros: they do not keep a block from sharing the scale of its first row.
    rows = scales.values.shape[-2]
    own = torch.arange(values.shape[-3] * BLOCK_ROWS, device=values.device).view(-1, 1, BLOCK_ROWS)
    if super_ is None and bool(((values == values[..., :1]) | (own >= rows)).all()):
        values = values[..., :1]
    return dataclasses.replace(
        scales,
        values=values.contiguous(),
        super=None if super_ is None else super_.contiguous(),
    )
