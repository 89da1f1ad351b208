"""The machine's own rates of reading, copying and multiplying."""

from __future__ import annotations

import ctypes
import time

from polysilicon_cpu import library

CEILINGS = ("read", "copy", "f32", "bf16", "int8")
"""What `ceiling` measures."""

_PRODUCTS = ("f32", "bf16", "int8")
_LEAST_TRIES = 3
_SECONDS = {"read": 1.0, "f32": 0.05, "bf16": 0.05, "int8": 0.05}


def ceiling(device: int, what: str, size: int = 0) -> float:
    """Operations, or bytes, a second of all threads; 0 where the level has no such instruction.

    device: the native one. what: of `CEILINGS`. size: bytes that are read or copied in all.
    """
    error = library.ErrorText()
    rate: float = library.load().ps_ceiling(device, CEILINGS.index(what), size, ctypes.byref(error))
    if error.status:
        library.raise_error(error)
    return rate


def ceilings(device: int, nbytes: int) -> dict[str, float]:
    """As `Device.ceilings`: the best of many tries, as other work on the machine only slows."""
    wanted = {"bandwidth": "read", **{dtype: dtype for dtype in _PRODUCTS}}
    rates = {name: _best(device, what, nbytes) for name, what in wanted.items()}
    return {name: rate for name, rate in rates.items() if rate}


def _best(device: int, what: str, nbytes: int) -> float:
    rates: list[float] = []
    end = time.perf_counter() + _SECONDS[what]
    while len(rates) < _LEAST_TRIES or time.perf_counter() < end:
        rates.append(ceiling(device, what, nbytes))
    return max(rates)
