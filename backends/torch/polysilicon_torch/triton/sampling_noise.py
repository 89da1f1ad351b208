"""Gumbel noise as `polysilicon.sampling.philox` specifies it, in plain arithmetic: the same on
every GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logarithm(x: tl.tensor) -> tl.tensor:
    """The natural logarithm of normal positive float32, within one unit in the last place.

    `log(2^k m) = k log 2 + log(1 + r)` with m in [sqrt(1/2), sqrt(2)) and
    `log(1 + r) = r - r^2 / 2 + r^3 P(r)`, P fitted to the least largest error. The logarithm that
    GPUs have is exact to 2^-22 only in absolute terms.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    r = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = -0.07634492963552475 * r + 0.12761574983596802
    p = p * r - 0.13160182535648346
    p = p * r + 0.14201758801937103
    p = p * r - 0.16623356938362122
    p = p * r + 0.20001226663589478
    p = p * r - 0.2500081956386566
    p = p * r + 0.3333333134651184
    k = exponent.to(tl.float32)
    # log 2 in two parts, the first of which times k is exact.
    return (r * r * (r * p - 0.5) - 2.1219444e-4 * k + r) + 0.693359375 * k


@triton.jit
def gumbel(words: tl.tensor) -> tl.tensor:
    """Random words, uint32, to noise."""
    u = tl.minimum(
        (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08
    )
    # log1p(-u): y misses 1 - u by a rounding that the second term makes good.
    y = 1.0 - u
    return -logarithm(-(logarithm(y) + ((1.0 - y) - u) / y))


@triton.jit
def noise_of(ids: tl.tensor, seed: tl.tensor, choice: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The noise of ids, int32. seed: int64; choice, position: int32, of unsigned bits."""
    a, b, c, d = _words((ids >> 2).to(tl.uint32), seed, choice, position)
    word = ids & 3
    return gumbel(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def noise_from(
    first: tl.tensor, seed: tl.tensor, choice: tl.tensor, position: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The noise of ids `first` to `first + BLOCK - 1`, first a multiple of 4: each call of the
    generator serves four."""
    counters = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    a, b, c, d = _words(counters, seed, choice, position)
    return gumbel(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def _words(
    counters: tl.tensor, seed: tl.tensor, choice: tl.tensor, position: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    zeros = counters * 0
    return tl.philox(
        seed,
        counters,
        zeros + choice.to(tl.uint32, bitcast=True),
        zeros + position.to(tl.uint32, bitcast=True),
        zeros,
    )
