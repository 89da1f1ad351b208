"""The counter-based random numbers of sampling, the same on every device and in every batch.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC'11) maps
a counter of four 32-bit words under a key of two to four random words. Token `id` of the row with
(seed, choice, position) takes its draw from

    key     = (seed mod 2^32, seed div 2^32)
    counter = (id div 4, choice, position, 0)        the last word is the domain; 0 is sampling
    x       = word number (id mod 4) of philox4x32(counter, key)

and turns it into noise, in float32 with round-to-nearest-even after each operation:

    u       = min((float32(x) + 0.5) * 2^-32, 1 - 2^-24)
    E       = -log1p(-u)                              exponential
    gumbel  = -log(E)

x and u are specified to the bit, and `polysilicon/testing/philox_vectors.json` holds examples. The
two logarithms may be computed in float32 or better, each with a relative error of a few units in
the last place: they can change a token only where the best two are tied to that precision.

Large Gumbel values, those that let an unlikely token win, come from u near 0, where u has float32's
full relative resolution: the noise lies between -2.82 (u = 1 - 2^-24) and 22.88 (u = 2^-33).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]

GUMBEL_RANGE = (-2.82, 22.88)
"""Bounds on every value of `to_gumbel`."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, in units of 2^-32
_CHUNK = 1 << 14  # counters at a time: scratch stays in the cache
_LARGEST_UNIFORM = np.float32(1 - 2**-24)


def philox4x32(counter: UInt32, key: UInt32) -> UInt32:
    """Philox4x32-10: counters uint32 `[..., 4]` and keys uint32 `[..., 2]`, which broadcast, to
    uint32 `[..., 4]`."""
    shape = np.broadcast_shapes(counter.shape[:-1], key.shape[:-1])
    c0, c1, c2, c3 = (np.broadcast_to(counter[..., word], shape) for word in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    with np.errstate(over="ignore"):  # keys step modulo 2^32; numpy warns where they are scalars
        for _ in range(_ROUNDS):
            high0, low0 = _multiply(c0, _MULTIPLIERS[0])
            high1, low1 = _multiply(c2, _MULTIPLIERS[1])
            high1 ^= c1
            high1 ^= k0
            high0 ^= c3
            high0 ^= k1
            c0, c1, c2, c3 = high1, low1, high0, low0
            k0, k1 = k0 + np.uint32(_KEY_STEPS[0]), k1 + np.uint32(_KEY_STEPS[1])
    return np.stack([c0, c1, c2, c3], axis=-1)


def _multiply(words: UInt32, factor: int) -> tuple[UInt32, UInt32]:
    """High and low halves of the 64-bit products, as new arrays."""
    product = words.astype(np.uint64)
    product *= np.uint64(factor)
    low = product.astype(np.uint32)
    product >>= np.uint64(32)
    return product.astype(np.uint32), low


def bits(seed: int, choice: int, position: int, count: int) -> UInt32:
    """The words x of ids `[0, count)`: uint32 `[count]`."""
    key = keys(np.array([seed], np.uint64))
    words = np.empty((-(-count // 4), 4), np.uint32)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        part[:] = (0, choice, position, 0)
        part[:, 0] = np.arange(start, start + len(part))
        part[:] = philox4x32(part, key)
    return words.reshape(-1)[:count]


def keys(seeds: npt.NDArray[np.uint64]) -> UInt32:
    """Keys of seeds: uint64 `[n]` to uint32 `[n, 2]`."""
    return np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], -1).astype(np.uint32)


def to_uniform(words: UInt32) -> Float32:
    """Random words to uniforms u in (0, 1), float32 of the same shape."""
    half_steps = words.astype(np.float32) + np.float32(0.5)
    uniform: Float32 = np.minimum(half_steps * np.float32(2**-32), _LARGEST_UNIFORM)
    return uniform


def to_gumbel(uniform: Float32) -> Float32:
    """Uniforms to standard Gumbel noise, float32 of the same shape."""
    return -np.log(-np.log1p(-uniform))


def uniforms(seed: int, choice: int, position: int, count: int) -> Float32:
    """The uniforms u of ids `[0, count)`: float32 `[count]`."""
    return to_uniform(bits(seed, choice, position, count))


def gumbel(seed: int, choice: int, position: int, count: int) -> Float32:
    """The Gumbel noise of ids `[0, count)`: float32 `[count]`."""
    return to_gumbel(uniforms(seed, choice, position, count))
