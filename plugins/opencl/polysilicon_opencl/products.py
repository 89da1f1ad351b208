"""Products and rows of placed matrices: which kernel, in which shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pyopencl as cl
from polysilicon.device_checks import check_indexes

from polysilicon_opencl.handles import Matrix, MatrixHandle
from polysilicon_opencl.values import Integers, Value

if TYPE_CHECKING:
    from polysilicon_opencl.ops import OpenCLOps

_PANEL_OUTPUTS, _PANEL_COLUMNS, _PANEL_TOKENS = 16, 1024, 128
"""A panel of 64 KB, which the second-level cache of any processor holds."""


def embed(ops: OpenCLOps, table: MatrixHandle, rows: Integers) -> Value:
    """Rows of a matrix: `[count, columns]`."""
    if len(table.matrices) != 1:
        raise ValueError("embed takes a matrix whose parts have one encoding")
    (matrix,) = table.matrices
    step = ops.current
    if rows.buffer is step.buffer and rows.at == step.tokens_at:
        known = step.host.token_source < 0
        check_indexes("tokens", step.host.tokens[known], matrix.outputs)
    out = ops.workspace.floats(rows.count, matrix.columns)
    kernel = ops.runtime.kernel("embed", "embed", **matrix.macros)
    ops.runtime.launch(kernel, rows.count, 1, matrix.buffer, rows.buffer, rows.at, out.buffer)
    return out


def linear(
    ops: OpenCLOps, x: Value, weight: MatrixHandle, bias: cl.Buffer | None
) -> tuple[Value, ...]:
    """`x W^T + bias`, a value for each part."""
    results: list[Value] = []
    done = 0
    for matrix in weight.matrices:
        out = ops.workspace.floats(x.rows, matrix.outputs)
        inputs = _ordered(ops, x, matrix)
        _multiply(ops, inputs, matrix, bias, done, out)
        done += matrix.outputs
        results += _split(out, matrix)
    return tuple(results)


def experts(
    ops: OpenCLOps, x: Value, weight: MatrixHandle, chosen: Integers, each: int
) -> tuple[Value, ...]:
    """Row t of the result is row `t // each` of x times the matrix of expert `chosen[t]`."""
    runtime = ops.runtime
    results: list[Value] = []
    for matrix in weight.matrices:
        out = ops.workspace.floats(chosen.count, matrix.outputs)
        inputs = _ordered(ops, x, matrix)
        tuning = runtime.tuning
        kernel = runtime.kernel(
            "product_few", "product_few", OUTPUTS=tuning.outputs, TOKENS=1, **matrix.macros
        )
        runtime.launch(
            kernel, math.ceil(matrix.outputs / tuning.outputs), chosen.count, inputs.buffer,
            inputs.at, inputs.stride, matrix.buffer, runtime.nothing, -1, out.buffer, chosen.count,
            matrix.outputs, matrix.outputs, chosen.buffer, each, 1,
        )  # fmt: skip
        results.append(out)
    return tuple(results)


def _multiply(
    ops: OpenCLOps, x: Value, matrix: Matrix, bias: cl.Buffer | None, bias_at: int, out: Value
) -> None:
    if x.columns != matrix.columns:
        raise ValueError(f"a product of {x.columns} columns with a matrix of {matrix.columns}")
    runtime, tuning = ops.runtime, ops.runtime.tuning
    arguments = (
        x.buffer, x.at, x.stride, matrix.buffer, runtime.nothing if bias is None else bias,
        -1 if bias is None else bias_at, out.buffer, x.rows, matrix.outputs, out.stride,
    )  # fmt: skip
    if x.rows <= tuning.few_rows:
        tokens = 1 if x.rows == 1 else tuning.tokens
        outputs = tuning.outputs if x.rows == 1 else tuning.outputs // 2
        kernel = runtime.kernel(
            "product_few", "product_few", OUTPUTS=outputs, TOKENS=tokens, **matrix.macros
        )
        groups = math.ceil(matrix.outputs / outputs)
        layers = math.ceil(x.rows / tokens)
        rounds = max(1, min(tuning.rounds, groups * layers // tuning.enough_groups))
        runtime.launch(
            kernel, math.ceil(groups / rounds), layers, *arguments, runtime.nothing, 0, rounds
        )
    elif tuning.panels:
        kernel = runtime.kernel(
            "product_panel", "product_panel", LANES=1, PANEL_OUTPUTS=_PANEL_OUTPUTS,
            PANEL_COLUMNS=_PANEL_COLUMNS, PANEL_TOKENS=_PANEL_TOKENS, **matrix.macros,
        )  # fmt: skip
        panels = math.ceil(matrix.outputs / _PANEL_OUTPUTS)
        runtime.launch(kernel, panels, math.ceil(x.rows / _PANEL_TOKENS), *arguments)
    else:
        side = tuning.side
        kernel = runtime.kernel(
            "product_tiled", "product_tiled", LANES=1, SIDE=side, **matrix.macros
        )
        columns, rows = (math.ceil(count / (4 * side)) for count in (matrix.outputs, x.rows))
        runtime.launch_groups(kernel, (side * columns, side * rows), (side, side), *arguments)


def _ordered(ops: OpenCLOps, x: Value, matrix: Matrix) -> Value:
    """The inputs in the order of the matrix' columns."""
    if not matrix.ordered:
        return x
    out = ops.workspace.floats(x.rows, x.columns)
    ops.runtime.launch(
        ops.runtime.kernel("rows", "take_columns"), x.rows, 1, x.buffer, x.at, x.stride,
        matrix.buffer, out.buffer,
    )  # fmt: skip
    return out


def _split(out: Value, matrix: Matrix) -> list[Value]:
    parts, begin = [], 0
    for columns in matrix.parts:
        parts.append(out.part(begin, columns))
        begin += columns
    return parts
