"""Quantised keys and values: the Walsh-Hadamard turn, int8 and e4m3 codes (`KV_DTYPES`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn(x: tl.tensor, DIM: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The Walsh-Hadamard transform of float32 `[rows, BLOCK]`, of which DIM columns count.

    A product of up to 128 columns at a time with a matrix of signs, which bf16 holds exactly, then
    sums and differences of what is farther apart. x is split in two of bf16, so that what is lost
    stays below 2^-16 of the largest value. Rows are at least 16.
    """
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = DIM & -DIM
    CHUNK: tl.constexpr = 128 if BLOCK > 128 else BLOCK
    INNER: tl.constexpr = CHUNK if SIZE > CHUNK else SIZE
    element = tl.arange(0, CHUNK)
    common = element[:, None] & element[None, :] & (INNER - 1)
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    same = (element // INNER)[:, None] == (element // INNER)[None, :]
    signs = tl.where(same, 1 - 2 * (common & 1), 0).to(tl.float32).to(tl.bfloat16)
    x = tl.reshape(x, (ROWS * (BLOCK // CHUNK), CHUNK))
    high = x.to(tl.bfloat16)
    turned = tl.dot(high, signs)
    turned = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), signs, turned)
    turned = tl.reshape(turned, (ROWS, BLOCK))
    if SIZE > 128:
        turned = _butterfly(turned, 128)
    if SIZE > 256:
        turned = _butterfly(turned, 256)
    tl.static_assert(SIZE <= 512, "heads of more than 512 elements are not turned")
    return turned * (SIZE**-0.5)


@triton.jit
def _butterfly(x: tl.tensor, DISTANCE: tl.constexpr) -> tl.tensor:
    """Sums and differences of `[rows, columns]` at a distance, in every block of twice that."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // (2 * DISTANCE)
    pairs = tl.permute(tl.reshape(x, (ROWS, BLOCKS, 2, DISTANCE)), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
    return tl.reshape(pairs, (ROWS, BLOCKS * 2 * DISTANCE))


@triton.jit
def scales(x: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """The scale of each row of float32 `[rows, columns]` whose largest code is LARGEST: 0 where it
    would be subnormal, NaN where a value is not finite."""
    magnitude = tl.abs(x)
    scale = tl.div_rn(tl.max(magnitude, 1), tl.full((x.shape[0],), LARGEST, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    broken = tl.max((magnitude < float("inf")).to(tl.int32) ^ 1, 1)
    return tl.where((broken != 0) | (scale == float("inf")), float("nan"), scale)


@triton.jit
def quotients(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """`x / scale` by row, 0 where the scale is 0 or NaN."""
    usable = scale > 0
    divisor = tl.broadcast_to(tl.where(usable, scale, 1.0)[:, None], x.shape)
    return tl.where(usable[:, None], tl.div_rn(x, divisor), 0.0)


@triton.jit
def int8_codes(x: tl.tensor) -> tl.tensor:
    """Float32 within 127 of 0 to the nearest int8, ties to even: the sum with 1.5 * 2^23 has the
    code in its lowest bits."""
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def e4m3_codes(x: tl.tensor) -> tl.tensor:
    """Float32 within 448 of 0 to the nearest e4m3fn, ties to even, as uint8.

    In integers, for no conversion of hardware is the same everywhere. Normal values round their
    bits; for those below 2^-6, the sum with 2^14 has the code in its lowest bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes: tl.tensor, dtype: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """uint8 codes of e4m3fn, none of them NaN, as `dtype`, exactly. NATIVE: by the target's own
    conversion; else by the bits, which read as float16 say 2^-8 of the value."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    wide = codes.to(tl.int16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return (half * 256.0).to(dtype)
