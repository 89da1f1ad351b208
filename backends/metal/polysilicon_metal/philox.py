"""The noise of sampling, as `polysilicon.sampling.philox` specifies it to the bit."""

from __future__ import annotations

import mlx.core as mx

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LARGEST_UNIFORM = 1 - 2**-24


def gumbel(
    seed: tuple[mx.array, mx.array], choice: mx.array, position: mx.array, count: int
) -> mx.array:
    """Gumbel noise float32 `[L, count]` of the ids `[0, count)`.

    seed: its low and high words, uint32 `[L]` as choice and position.
    """
    words = bits(seed, choice, position, count)
    half_steps = words.astype(mx.float32) + 0.5
    uniform = mx.minimum(half_steps * 2**-32, _LARGEST_UNIFORM)
    return -mx.log(-mx.log1p(-uniform))


def bits(
    seed: tuple[mx.array, mx.array], choice: mx.array, position: mx.array, count: int
) -> mx.array:
    """The random words uint32 `[L, count]` of the ids `[0, count)`."""
    rows = choice.shape[0]
    blocks = mx.arange(-(-count // 4), dtype=mx.uint32)[None]
    shape = (rows, blocks.shape[1])
    c0 = mx.broadcast_to(blocks, shape)
    c1 = mx.broadcast_to(choice[:, None], shape)
    c2 = mx.broadcast_to(position[:, None], shape)
    c3 = mx.zeros(shape, dtype=mx.uint32)
    k0, k1 = (word[:, None] for word in seed)
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + mx.array(_KEY_STEPS[0], dtype=mx.uint32)
        k1 = k1 + mx.array(_KEY_STEPS[1], dtype=mx.uint32)
    return mx.stack([c0, c1, c2, c3], axis=-1).reshape(rows, -1)[:, :count]


def _multiply(words: mx.array, factor: int) -> tuple[mx.array, mx.array]:
    """High and low halves of the 64-bit products."""
    product = words.astype(mx.uint64) * mx.array(factor, dtype=mx.uint64)
    high = product >> mx.array(32, dtype=mx.uint64)
    return high.astype(mx.uint32), product.astype(mx.uint32)
