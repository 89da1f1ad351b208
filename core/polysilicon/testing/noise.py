"""The sampling noise once more, in plain integers and float64: the oracle of the devices' own.

Philox4x32-10 after Salmon, Moraes, Dror, Shaw (SC'11); counter, key and conversion as
`polysilicon.sampling.philox` specifies them.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

_WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = right >> 32 ^ b ^ k0, right & _WORD, left >> 32 ^ d ^ k1, left & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return a, b, c, d


def word(seed: int, choice: int, position: int, token: int) -> int:
    """The 32 random bits of a token."""
    counter = (token // 4, choice, position, 0)
    return _words(counter, (seed & _WORD, seed >> 32))[token % 4]


_words = functools.lru_cache(maxsize=64)(philox)


def uniform(bits: int) -> float:
    value = np.float32(np.float32(bits) + np.float32(0.5)) * np.float32(2**-32)
    return min(float(value), 1 - 2**-24)


def gumbel(seed: int, choice: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """The noise of tokens 0 to count - 1."""
    draws = [uniform(word(seed, choice, position, token)) for token in range(count)]
    return np.array([-math.log(-math.log1p(-draw)) for draw in draws])
