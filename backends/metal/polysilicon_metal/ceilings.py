"""What MLX does at most on this machine: its rates of reading, and of products."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

_SECONDS = 0.2
"""How long one thing is measured."""

_ROUND = 0.01
"""Of so many operations at least that starting and awaiting them takes little of their time."""

_SIDES = (128, 256, 512, 1024, 2048, 4096)
"""Of square matrices: the larger, the less of their product is not multiplying."""

_LONG_PRODUCT = 1e-3

_DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def ceilings(nbytes: int) -> dict[str, float]:
    """As `Device.ceilings`, on the current stream."""
    rates = {"bandwidth": _bandwidth(nbytes)}
    for name, dtype in _DTYPES.items():
        rates[name] = _products(dtype)
    mx.clear_cache()
    return rates


def _bandwidth(nbytes: int) -> float:
    values = mx.ones((max(1, nbytes // 4),), dtype=mx.float32)
    mx.eval(values)

    def read(repeats: int) -> None:
        mx.eval([mx.sum(values) for _ in range(repeats)])

    return float(values.nbytes / _seconds(read))


def _products(dtype: mx.Dtype) -> float:
    """Of the first side whose product takes a while."""
    for side in _SIDES:
        multiply = _chain(side, dtype)
        multiply(1)
        begin = time.perf_counter()
        multiply(1)
        if time.perf_counter() - begin > _LONG_PRODUCT:
            break
    return float(2 * side**3 / _seconds(multiply))


def _chain(side: int, dtype: mx.Dtype) -> Callable[[int], None]:
    """Products that each need the last, so that none of them is kept."""
    a, b = (mx.random.normal((side, side)).astype(dtype) for _ in range(2))
    b = b * side**-0.5
    mx.eval(a, b)

    def multiply(repeats: int) -> None:
        product = a
        for _ in range(repeats):
            product = mx.matmul(product, b)
        mx.eval(product)

    return multiply


def _seconds(work: Callable[[int], None]) -> float:
    """Of one operation: the fastest of some rounds, as other work only slows. work: does as many of
    them as it is told."""
    repeats, least = 1, float("inf")
    end = time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter()
        work(repeats)
        now = time.perf_counter()
        least = min(least, (now - begin) / repeats)
        if now >= end:
            return least
        if now - begin < _ROUND:
            repeats *= 2
