"""The patched interpreter against torch's own casts and products."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def cast_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def arithmetic_kernel(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(c + i, tl.where(x < y, -(x * y) + x, tl.maximum(x, y) / y))


def cast(x, dtype):
    y = torch.zeros(len(x), dtype=dtype)
    cast_kernel[(1,)](x, y, N=len(x))
    return y


def values(dtype, count=1024):
    """Bits at random, so subnormals, infinities and NaN too, and halves between two of bf16."""
    generator = np.random.default_rng()
    integer = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    bits = generator.integers(0, 1 << 8 * dtype.itemsize, count, integer)
    if dtype == torch.float32:
        bits[::2] &= 0xFFFF8000
        bits[::4] &= 0x8FFFFFFF
        bits[::4] |= 0x38000000
    return torch.from_numpy(bits).view(dtype)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_casts_round_to_nearest_even(source, target):
    x = values(source)
    expected = x.float()
    if target == torch.float8_e4m3fn:
        expected = expected.clamp(-448, 448)
    expected = expected.to(target).float()
    torch.testing.assert_close(cast(x, target).float(), expected, rtol=0, atol=0, equal_nan=True)


def test_halves_go_to_the_even_one():
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 2 - 2.0**-9] * 4)
    assert cast(x, torch.bfloat16).tolist() == [1, 1 + 2.0**-6, -1, 2] * 4
    x = torch.tensor([1.0625, 1.1875, 1.9375, 2.0**-10] * 4)
    assert cast(x, torch.float8_e4m3fn).tolist() == [1, 1.25, 2, 0] * 4


def test_e4m3_saturates():
    x = torch.tensor([448, 464, 479, 1e30, -1e30, torch.inf, -torch.inf, 460])
    assert cast(x, torch.float8_e4m3fn).tolist() == [448, 448, 448, 448, -448, 448, -448, 448]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.int64], ids=str)
def test_integers_to_bfloat16(dtype):
    x = torch.randint(0 if dtype == torch.uint8 else -128, 128, (256,), dtype=dtype)
    assert torch.equal(cast(x, torch.bfloat16), x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dots_accumulate_in_float32(dtype):
    a, b = torch.randn(2, 32, 32).to(dtype)
    c = torch.zeros(32, 32)
    dot_kernel[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_arithmetic_of_bfloat16():
    a, b = torch.randn(2, 256).bfloat16()
    c = torch.zeros_like(a)
    arithmetic_kernel[(1,)](a, b, c, N=256)
    assert torch.equal(c, torch.where(a < b, -(a * b) + a, torch.maximum(a, b) / b))
