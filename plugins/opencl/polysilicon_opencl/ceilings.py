"""What a device does at most: its rates of reading, and of multiplying in float32."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from polysilicon_opencl.runtime import Runtime

_SECONDS = 0.4
"""How long one thing is measured."""

_ROUND = 0.01
"""Of so much work at least that starting and awaiting it takes little of its time."""

_GROUPS = 32
"""Work-groups for each compute unit."""

_SUMS = 12
"""As in `kernels/ceilings.cl`."""

_STEPS = 1 << 12


def ceilings(runtime: Runtime, nbytes: int) -> dict[str, float]:
    """As `Device.ceilings`. Products have no other dtype here."""
    return {"bandwidth": _bandwidth(runtime, nbytes), "f32": _products(runtime)}


def _bandwidth(runtime: Runtime, nbytes: int) -> float:
    width = runtime.tuning.vector
    kernel = runtime.kernel("ceilings", "read_words", WIDTH=width)
    groups = _groups(runtime)
    each = max(1, nbytes // (4 * groups * kernel.lanes * width))
    size = 4 * groups * each * kernel.lanes * width
    runtime.check_buffer("a working set", size)
    words = runtime.allocate("a working set", size)
    runtime.fill_zeros(words, 0, size)
    out = runtime.allocate("results", 4 * groups * kernel.lanes)
    return size / _seconds(runtime, lambda: runtime.launch(kernel, groups, 1, words, each, out))


def _products(runtime: Runtime) -> float:
    width = runtime.tuning.vector
    kernel = runtime.kernel("ceilings", "multiply", WIDTH=width)
    groups = _groups(runtime)
    out = runtime.allocate("results", 4 * groups * kernel.lanes)
    operations = 2 * _SUMS * width * _STEPS * groups * kernel.lanes
    factor = np.float32(0.5)  # towards 1, so that no sum overflows
    seconds = _seconds(runtime, lambda: runtime.launch(kernel, groups, 1, _STEPS, factor, out))
    return operations / seconds


def _groups(runtime: Runtime) -> int:
    return _GROUPS * int(runtime.device.max_compute_units)


def _seconds(runtime: Runtime, call: Callable[[], object]) -> float:
    """Of one call: the fastest of some rounds, as other work only slows."""
    call()
    runtime.finish()
    repeats, least = 1, float("inf")
    end = time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        runtime.finish()
        now = time.perf_counter()
        least = min(least, (now - begin) / repeats)
        if now >= end:
            return least
        if now - begin < _ROUND:
            repeats *= 2
