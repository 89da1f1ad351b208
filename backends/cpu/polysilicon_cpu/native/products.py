"""Single products outside of any program: for tests and benchmarks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_int, c_void_p

import numpy as np
import numpy.typing as npt

from polysilicon_cpu import library
from polysilicon_cpu.arrays import Float32, address
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.handles import MatrixHandle

_ERROR = POINTER(library.ErrorText)


@functools.cache
def _native() -> ctypes.CDLL:
    native = library.load()
    native.ps_linear.restype = c_bool
    native.ps_linear.argtypes = (
        c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p, _ERROR,
    )  # fmt: skip
    native.ps_linear_chain.restype = c_bool
    native.ps_linear_chain.argtypes = (
        c_void_p, c_void_p, c_int, c_void_p, c_int, c_void_p, c_int, c_void_p, _ERROR,
    )  # fmt: skip
    return native


def linear(
    device: CPUDevice, weight: MatrixHandle, x: Float32, bias: Float32 | None = None
) -> Float32:
    """`x W^T + bias` over all parts: x `[rows, K]`, bias `[N]`, result `[rows, N]`."""
    count = sum(weight.parts)
    assert x.shape[1:] == (weight.inputs,)
    assert bias is None or bias.shape == (count,)
    x = np.ascontiguousarray(x, np.float32)
    result = np.full((len(x), count), np.nan, np.float32)
    error = library.ErrorText()
    if not _native().ps_linear(
        device.pointer, weight.pointer, address(x), len(x), address(result),
        None if bias is None else address(bias), 1, None, ctypes.byref(error),
    ):  # fmt: skip
        library.raise_error(error)
    return result


def chain_seconds(
    device: CPUDevice, weights: Sequence[MatrixHandle], x: Float32, repeats: int
) -> npt.NDArray[np.float64]:
    """How long the products of all weights took, one after the other, in each of `repeats` runs.

    x: `[rows, K]` for the widest of the weights; the others read as many of its numbers as they
    need.
    """
    assert x.shape[1] >= max(weight.inputs for weight in weights)
    x = np.ascontiguousarray(x, np.float32)
    out = np.zeros((len(x), max(sum(weight.parts) for weight in weights)), np.float32)
    pointers = (c_void_p * len(weights))(*(weight.pointer for weight in weights))
    seconds = np.zeros(repeats)
    error = library.ErrorText()
    if not _native().ps_linear_chain(
        device.pointer, pointers, len(weights), address(x), len(x), address(out), repeats,
        address(seconds), ctypes.byref(error),
    ):  # fmt: skip
        library.raise_error(error)
    return seconds
