"""What numpy does at most on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

_TRIES = 5
_PRODUCT_SIZE = 512
_LEAST_PASS = 1 << 28


def ceilings(nbytes: int) -> dict[str, float]:
    """As `Device.ceilings`: the best of several tries of finding the largest of `nbytes` bytes of
    numbers, on as many threads as there are processors, and of a float32 matrix product as numpy's
    BLAS computes it."""
    return {"bandwidth": _bandwidth(nbytes), "f32": _products()}


def _bandwidth(nbytes: int) -> float:
    threads = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    count = max(1, nbytes // 8 // threads)
    parts = [np.ones(count, np.int64) for _ in range(threads)]
    repeats = 1 + _LEAST_PASS // (count * 8 * threads)

    def read(part: npt.NDArray[np.int64]) -> None:
        for _ in range(repeats):
            part.max()

    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(read, parts)))
    return count * 8 * threads * repeats / seconds


def _products() -> float:
    matrix = np.ones((_PRODUCT_SIZE, _PRODUCT_SIZE), np.float32)
    out = np.empty_like(matrix)
    return 2 * _PRODUCT_SIZE**3 / _best(lambda: np.matmul(matrix, matrix, out=out))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest try; other work on the machine only slows."""
    seconds = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
