"""Makes Triton's interpreter compute as a GPU does: a patch for tests only.

What Triton 3.9's own does: bfloat16 is kept as its bits, which arithmetic and `tl.dot` take for
integers, as do casts of integers to it; casts to bfloat16 cut off, and casts to float8 round halves
up, into the wrong exponent where that carries, and e4m3 past 448 to 480 and beyond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = npt.NDArray[Any]

_STORED_AS_BITS = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
    tl.float8e5b16: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
"""Types that the interpreter keeps as unsigned integers, and what they are."""


def install() -> None:
    """Patch the interpreter, once. Needs TRITON_INTERPRET to have been set before kernels are
    imported, to be of use."""
    if getattr(InterpreterBuilder, "_computes_as_a_gpu", False):
        return
    builder = InterpreterBuilder
    builder._computes_as_a_gpu = True
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _round(builder.create_fp_to_fp)
    builder.create_dot = _dot(builder.create_dot)
    builder.unary_op = _unary(builder.unary_op)
    builder.binary_op = _binary(builder.binary_op)
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _kept(interpreter._get_np_dtype)


def _decoded(handle: Any) -> Array:
    """The numbers of a handle, those that are kept as bits in float32."""
    kept = _STORED_AS_BITS.get(handle.dtype.scalar)
    data: Array = handle.data
    return data if kept is None else data.view(kept).astype(np.float32)


def _encoded(values: Array, scalar: Any) -> Any:
    """Numbers as a handle of a type, rounded to nearest even; e4m3 stays finite, as the
    conversions of GPUs do."""
    kept = _STORED_AS_BITS[scalar]
    if scalar == tl.float8e4nv:
        values = np.clip(values.astype(np.float32), -448, 448)
    with np.errstate(all="ignore"):
        bits = values.astype(np.float32).astype(kept).view(f"u{kept.itemsize}")
    return TensorHandle(bits, scalar)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if target.scalar in _STORED_AS_BITS:
            return _encoded(_decoded(source), target.scalar)
        if source.dtype.scalar in _STORED_AS_BITS:
            wide = TensorHandle(_decoded(source), tl.float32)
            return wide if target.scalar == tl.float32 else original(self, wide, target)
        return original(self, source, target)

    return cast_impl


def _round(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding is not None and rounding.name != "RTNE":
            return original(self, source, target, rounding)
        return self.cast_impl(source, target)

    return create_fp_to_fp


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        a, b = (
            TensorHandle(_decoded(x), tl.float32) if x.dtype.scalar in _STORED_AS_BITS else x
            for x in (a, b)
        )
        return original(self, a, b, d, precision, imprecise)

    return create_dot


def _unary(original: Callable[..., Any]) -> Callable[..., Any]:
    def unary_op(self: Any, x: Any, operation: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return original(self, x, operation)
        return _encoded(operation(_decoded(x)), tl.bfloat16)

    return unary_op


def _binary(original: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return original(self, left, right, operation)
        result = operation(_decoded(left), _decoded(right))
        if result.dtype == np.bool_:
            # The original names a comparison by its operands' type too; its caller corrects that.
            return TensorHandle(result, tl.bfloat16)
        return _encoded(result, tl.bfloat16)

    return binary_op


def _kept(original: Callable[..., Any]) -> Callable[..., Any]:
    """What numpy type stands for a type, asked of Triton once a type: it writes its whole table
    down for every answer, a tenth of an operation's time."""
    of_scalar = functools.cache(original)

    def get_np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        return original(scalar) if scalar.is_ptr() else of_scalar(scalar)

    return get_np_dtype


def _call(self: Any, *arguments: Any, **keywords: Any) -> Any:
    """A call of a function inside a kernel. Triton's own patches all of its language for each one,
    which takes longer than most of them do; a launch has patched it already, but for the functions
    of the language itself, which see it by another name."""
    names = self.fn.__globals__.values()
    if any((name is tl or name is tl.core) and tl.core.is_builtin(name.load) for name in names):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*arguments, **keywords)
