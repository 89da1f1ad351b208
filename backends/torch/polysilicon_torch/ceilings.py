"""What a card does at most: its rates of reading, and of products as torch's libraries compute
them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch

from polysilicon_torch.runtime import Runtime
from polysilicon_torch.target import Float8

_SECONDS = 0.15
"""How long one thing is measured."""

_ROUND = 0.01
"""Of so many calls at least that waiting for the last of them takes little of their time."""

_SIDES = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Of square matrices: the larger, the less of their product is not multiplying."""

_LONG_PRODUCT = 1e-3

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_FLOAT8 = {"ocp": torch.float8_e4m3fn, "fnuz": torch.float8_e4m3fnuz}

Call = Callable[[], object]


def ceilings(runtime: Runtime, nbytes: int, float8: Float8) -> dict[str, float]:
    """As `Device.ceilings`. float8: of the card's matrix units."""
    rates = {"bandwidth": _bandwidth(runtime, nbytes)}
    for name, product_of in _products(runtime.device, float8):
        rates[name] = _product_rate(runtime, product_of)
    return rates


def _bandwidth(runtime: Runtime, nbytes: int) -> float:
    """Of a sum, which only reads, or of a copy, which writes as much: whichever is faster."""
    values = torch.ones(max(2, nbytes // 4), dtype=torch.float32, device=runtime.device)
    half = len(values) // 2
    source, target = values[:half], values[-half:]
    read = values.nbytes / _seconds(runtime, values.sum)
    return max(read, 2 * source.nbytes / _seconds(runtime, lambda: target.copy_(source)))


def _products(device: torch.device, float8: Float8) -> Iterator[tuple[str, Callable[[int], Call]]]:
    """By dtype: what makes the product of two square matrices of a given side."""
    for name, dtype in _DTYPES.items():
        yield name, functools.partial(_dense, device, dtype)
    if float8 != "none":
        scaled = functools.partial(_scaled, device, _FLOAT8[float8])
        if _is_there(scaled):
            yield "fp8", scaled


def _dense(device: torch.device, dtype: torch.dtype, side: int) -> Call:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=out)


def _scaled(device: torch.device, dtype: torch.dtype, side: int) -> Call:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)


def _is_there(product_of: Callable[[int], Call]) -> bool:
    """Whether torch's libraries have such products for the device."""
    try:
        product_of(_SIDES[0])()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError:
        return False
    return True


def _product_rate(runtime: Runtime, product_of: Callable[[int], Call]) -> float:
    """Of the first side whose product takes a while."""
    for side in _SIDES:
        product = product_of(side)
        product()
        runtime.synchronize()
        begin = time.perf_counter()
        product()
        runtime.synchronize()
        if side == _SIDES[-1] or time.perf_counter() - begin > _LONG_PRODUCT:
            return 2 * side**3 / _seconds(runtime, product)
    raise AssertionError("there is a last side")


def _seconds(runtime: Runtime, call: Call) -> float:
    """Of one call: the fastest of some rounds, as other work only slows."""
    call()
    runtime.synchronize()
    repeats, least = 1, float("inf")
    end = time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        runtime.synchronize()
        now = time.perf_counter()
        least = min(least, (now - begin) / repeats)
        if now >= end:
            return least
        if now - begin < _ROUND:
            repeats *= 2
