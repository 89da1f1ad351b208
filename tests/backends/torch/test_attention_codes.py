"""Rotary embedding and the codes of quantised KV, each against numpy."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from polysilicon.backend import Rope
from polysilicon.reference.pools import quantize
from polysilicon.testing import oracles
from polysilicon_torch.angles import turns_of
from polysilicon_torch.kernels import DeviceRope
from polysilicon_torch.target import INTERPRETER
from polysilicon_torch.triton import attention_codes, rope
from polysilicon_torch.triton.attention_codes import (
    e4m3_codes,
    e4m3_values,
    int8_codes,
    quotients,
    scales,
)
from polysilicon_torch.triton.rope import cosine_and_sine
from polysilicon_torch.tuning import Tuning

TUNING = Tuning.of(INTERPRETER)


@triton.jit
def cosine_and_sine_kernel(angles, cosines, sines, N: tl.constexpr):
    i = tl.arange(0, N)
    cosine, sine = cosine_and_sine(tl.load(angles + i))
    tl.store(cosines + i, cosine)
    tl.store(sines + i, sine)


def test_cosine_and_sine():
    random = np.random.default_rng().integers(-(2**63), 2**63, 2000)
    eighths = np.array([k * 2**61 + d for k in range(-4, 4) for d in (-1, 0, 1, 1 << 40)][1:])
    angles = np.concatenate([random, eighths])
    angles = np.resize(angles, 4096)
    cosines, sines = torch.empty(2, 4096)
    cosine_and_sine_kernel[(1,)](torch.from_numpy(angles), cosines, sines, N=4096)
    radians = angles.astype(np.float64) * (2 * np.pi / 2**64)
    assert np.abs(cosines.numpy() - np.cos(radians)).max() < 2e-7
    assert np.abs(sines.numpy() - np.sin(radians)).max() < 2e-7


@pytest.mark.parametrize("frequency", [0.0, 1.0, 1e-9, 3.5, 7.0, 0.123456789])
@pytest.mark.parametrize("position", [0, 1, 131071, 2**31 - 1])
def test_angles_are_exact(frequency, position):
    turns = turns_of([frequency])
    assert turns.dtype == torch.int64
    angle = int(turns) * position % 2**64
    expected = Fraction(frequency) / Fraction(2 * np.pi) * position
    error = abs(Fraction(angle, 2**64) - expected) % 1
    assert min(error, 1 - error) <= Fraction(1, 2**34)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(32, 32), (48, 20), (24, 2)])
def test_rope(dtype, interleaved, dim, rotary):
    rng = np.random.default_rng()
    frequencies = tuple(1e4 ** (-np.arange(rotary // 2) / (rotary // 2)))
    wanted = Rope(dim=rotary, frequencies=frequencies, interleaved=interleaved, scale=1.25)
    positions = np.array([0, 1, 7, 131071, 1_000_003], np.int32)
    wide = torch.from_numpy(rng.standard_normal((5, 3 * dim + 7), np.float32)).to(dtype)
    x = wide[:, 7:]
    placed = DeviceRope(
        dim=rotary,
        frequencies=torch.tensor(frequencies),
        turns=turns_of(frequencies),
        scale=1.25,
        interleaved=interleaved,
    )
    actual = rope.rope(x, torch.from_numpy(positions), placed, 3, tuning=TUNING)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    values = x.double().numpy().reshape(5, 3, dim)
    expected = oracles.rotate(values, positions, wanted).reshape(5, -1)
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert np.abs(actual.double().numpy() - expected).max() < bound


def test_rope_of_no_tokens():
    placed = DeviceRope(
        dim=2, frequencies=torch.ones(1), turns=turns_of([1.0]), scale=1.0, interleaved=False
    )
    x = torch.empty(0, 8)
    assert rope.rope(x, torch.empty(0, dtype=torch.int32), placed, 2, tuning=TUNING).shape == (0, 8)


@triton.jit
def codes_kernel(x, int8, e4m3, N: tl.constexpr):
    i = tl.arange(0, N)
    values = tl.load(x + i)
    tl.store(e4m3 + i, e4m3_codes(values))
    tl.store(int8 + i, int8_codes(tl.clamp(values, -127.0, 127.0)))


def test_codes_round_to_nearest_even():
    rng = np.random.default_rng()
    all_codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    all_codes = np.unique(all_codes[np.isfinite(all_codes)])
    middles = (all_codes[1:] + all_codes[:-1]) / 2
    halves = np.arange(-253, 254) / 2
    tiny = rng.uniform(-(2.0**-6), 2.0**-6, 1000)
    x = np.concatenate(
        [all_codes, middles, halves, tiny, rng.uniform(-448, 448, 1000), [0.0, -0.0]]
    )
    x = np.resize(np.concatenate([x, np.nextafter(np.float32(x), np.float32(0))]), 8192)
    x = x.astype(np.float32)
    int8 = torch.empty(8192, dtype=torch.int8)
    e4m3 = torch.empty(8192, dtype=torch.uint8)
    codes_kernel[(1,)](torch.from_numpy(x), int8, e4m3, N=8192)
    assert np.array_equal(e4m3.numpy(), x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert np.array_equal(int8.numpy(), np.rint(np.clip(x, -127, 127)).astype(np.int8))


@triton.jit
def values_kernel(codes, values, NATIVE: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(values + i, e4m3_values(tl.load(codes + i), values.dtype.element_ty, NATIVE))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_of_every_code(dtype, native):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    values = torch.empty(256, dtype=dtype)
    values_kernel[(1,)](codes, values, NATIVE=native)
    assert torch.equal(values.float(), codes.view(torch.float8_e4m3fn).float())


@triton.jit
def turn_kernel(x, y, DIM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * DIM + tl.arange(0, BLOCK)[None, :]
    mask = (tl.arange(0, BLOCK) < DIM)[None, :]
    turned = attention_codes.turn(tl.load(x + at, mask=mask, other=0.0), DIM=DIM, BLOCK=BLOCK)
    tl.store(y + at, turned, mask=mask)


@pytest.mark.parametrize("dim", [8, 16, 24, 96, 128, 192, 256, 512])
def test_turn(dim):
    x = torch.randn(16, dim)
    y = torch.empty_like(x)
    turn_kernel[(1,)](x, y, DIM=dim, BLOCK=max(16, triton.next_power_of_2(dim)))
    expected = x.double().numpy() @ oracles.hadamard(dim)
    assert np.abs(y.numpy() - expected).max() < 2.0**-16 * np.abs(expected).max() * 2


@triton.jit
def quantise_kernel(x, q, s, LARGEST: tl.constexpr):
    row = tl.arange(0, 16)
    at = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + at)
    scale = scales(values, LARGEST=LARGEST)
    tl.store(q + at, quotients(values, scale))
    tl.store(s + row, scale)


def test_scales_of_extreme_vectors():
    x = np.random.default_rng().standard_normal((16, 32), np.float32)
    x[0] = 0
    x[1] = 1e-37
    x[2] *= 2.0**-100
    x[3] *= 2.0**120
    x[4, 1:] = 0
    x[5, 3], x[6, 0], x[7, 31] = np.inf, np.nan, -np.inf
    x[8] = 1e-45
    quotient, scale = torch.empty(16, 32), torch.empty(16)
    quantise_kernel[(1,)](torch.from_numpy(x), quotient, scale, LARGEST=448.0)
    codes, expected = quantize(x, "fp8_e4m3")
    np.testing.assert_array_equal(scale.numpy(), expected[:, 0])
    assert np.array_equal(
        quotient.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8), codes.view(np.uint8)
    )
