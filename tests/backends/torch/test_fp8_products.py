"""Products of fp8 with fp8 in Triton's interpreter."""

import dataclasses

import numpy as np
import pytest
import torch

from polysilicon.testing import encoded
from polysilicon_torch.packing import place_matrices
from polysilicon_torch.target import INTERPRETER, TARGETS
from polysilicon_torch.triton.fp8_products import fp8_product, takes_fp8_product
from polysilicon_torch.triton_kernels import TritonKernels
from polysilicon_torch.tuning import Tuning

CPU = torch.device("cpu")


@pytest.fixture
def rng():
    return np.random.default_rng()


def tuning_of(fp8):
    target = dataclasses.replace(INTERPRETER, fp8=fp8)
    choice = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32}
    return Tuning.of(target).over("fp8_product", choice).over("fp8_quantize", {"BLOCK": 32})


def rounded(x, fp8):
    """What activations are after their rounding: e4m3 of a fraction of the row's largest."""
    dtype, largest = (torch.float8_e4m3fnuz, 240) if fp8 == "fnuz" else (torch.float8_e4m3fn, 448)
    scale = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / largest
    codes = (x.float() / scale).clamp(-largest, largest).to(dtype)
    return codes.double() * scale.double()


@pytest.mark.parametrize("fp8", ["ocp", "fnuz"])
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize(
    ("shape", "group", "block"),
    [
        ((21, 96), 96, None),
        ((21, 100), 100, None),
        ((37, 128), 32, None),
        ((40, 192), 192, (16, 64)),
        ((33, 100), 100, (32, 64)),
        ((8, 64), 64, (5, 32)),
    ],
)
def test_products(rng, shape, group, block, rows, fp8):
    weight = encoded.group_float(rng, shape, "f8_e4m3", group, block=block)
    [(matrix, _)] = place_matrices(
        [weight.weight], None, dtype=torch.bfloat16, device=CPU, keep_codes=True
    )
    tuning = tuning_of(fp8)
    assert takes_fp8_product(matrix, tuning.target)
    x = torch.from_numpy(rng.standard_normal((rows, shape[1]), np.float32)).to(torch.bfloat16)
    x[0] *= 1000
    bias = torch.from_numpy(rng.standard_normal(shape[0], np.float32))
    actual = fp8_product(x, matrix, bias=bias, out_dtype=torch.float32, tuning=tuning)
    expected = rounded(x, fp8).numpy() @ weight.values.T + bias.double().numpy()
    scale = np.abs(expected).max(axis=1, keepdims=True)
    # A quotient that lies between two codes may round to either.
    assert (np.abs(actual.numpy() - expected) <= 4e-3 * scale).all()


def test_input_order_and_empty(rng):
    weight = encoded.group_float(rng, (12, 64), "f8_e4m3", 32, "input_order")
    [(matrix, _)] = place_matrices(
        [weight.weight], None, dtype=torch.bfloat16, device=CPU, keep_codes=True
    )
    x = torch.from_numpy(rng.standard_normal((2, 64), np.float32))
    actual = fp8_product(x, matrix, bias=None, out_dtype=torch.float32, tuning=tuning_of("ocp"))
    expected = rounded(x, "ocp").numpy() @ weight.values.T
    assert np.abs(actual.numpy() - expected).max() <= 4e-3 * np.abs(expected).max()
    none = fp8_product(x[:0], matrix, bias=None, out_dtype=torch.float32, tuning=tuning_of("ocp"))
    assert none.shape == (0, 12)


def test_zero_rows_stay_zero(rng):
    weight = encoded.group_float(rng, (12, 64), "f8_e4m3", 64)
    [(matrix, _)] = place_matrices(
        [weight.weight], None, dtype=torch.bfloat16, device=CPU, keep_codes=True
    )
    x = torch.zeros((2, 64), dtype=torch.bfloat16)
    actual = fp8_product(x, matrix, bias=None, out_dtype=torch.float32, tuning=tuning_of("ocp"))
    assert not actual.any()


def test_what_it_takes(rng):
    """e4m3 with one scale a run of at least 32 inputs, on targets that multiply fp8."""
    kinds = {
        "float:f8_e4m3/32": True, "float:f8_e4m3/16": False, "float:f8_e5m2/32": False,
        "affine:8/32": False, "dense:f16": False,
    }  # fmt: skip
    for kind, taken in kinds.items():
        weight = encoded.of_kind(kind)(rng, (8, 64)).weight
        [(matrix, _)] = place_matrices(
            [weight], None, dtype=torch.bfloat16, device=CPU, keep_codes=True
        )
        assert takes_fp8_product(matrix, TARGETS["sm_90"]) == taken
        assert not takes_fp8_product(matrix, TARGETS["sm_80"])


@pytest.mark.parametrize("rows", [1, 5])
def test_kernels_take_it_only_when_asked(rng, rows):
    """`activations=fp8` rounds the inputs of e4m3 weights, and of no others."""
    tuning = tuning_of("ocp")
    x = torch.from_numpy(rng.standard_normal((rows, 64), np.float32))
    part = encoded.group_float(rng, (24, 64), "f8_e4m3", 64)
    ((matrix, _),) = place_matrices(
        [part.weight], None, dtype=torch.float32, device=CPU, keep_codes=True
    )
    exact = x.double() @ torch.from_numpy(part.values).T
    coarse = rounded(x, "ocp") @ torch.from_numpy(part.values).T
    for fp8, expected in ((False, exact), (True, coarse)):
        kernels = TritonKernels(torch.float32, CPU, tuning, fp8=fp8)
        actual = kernels.linear(x, matrix, None)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)
    assert (exact - coarse).abs().max() > 1e-3


@pytest.mark.parametrize("fp8", ["ocp", "fnuz", "none"])
def test_every_code(rng, fp8):
    """-0 counts as 0 and NaN as NaN, which e4m3fnuz writes otherwise: 0x80 is its only NaN."""
    tuning = tuning_of(fp8)
    part = encoded.group_float(rng, (5, 256), "f8_e4m3", 256)
    every = np.arange(256, dtype=np.uint8)
    numbers = every[every & 0x7F != 0x7F]
    part.weight.codes[0] = np.resize(numbers, 256)
    part.weight.codes[1] = 0x80
    broken = every, np.where(every == 9, 0x7F, 0), np.where(every == 200, 0xFF, 0x3C)
    x = torch.from_numpy(rng.standard_normal((2, 256), np.float32))
    for count in (0, 1, 3):
        for row, codes in enumerate(broken[:count]):
            part.weight.codes[2 + row] = codes
        values = torch.from_numpy(part.weight.dequantize())
        for dtype in (torch.float32, torch.bfloat16):
            ((matrix, _),) = place_matrices(
                [part.weight], None, dtype=dtype, device=CPU, keep_codes=True
            )
            kernels = TritonKernels(dtype, CPU, tuning, fp8=True)
            actual = kernels.linear(x, matrix, None)
            taken = count == 0 and fp8 != "none"
            inputs = rounded(x.to(dtype), fp8) if taken else x.to(dtype).double()
            assert actual.isnan().all(0).tolist() == [
                row in range(2, 2 + count) for row in range(5)
            ]
            finite = [row for row in range(5) if row not in range(2, 2 + count)]
            weights = values[finite].double()
            error = (actual[:, finite].double() - inputs @ weights.T).abs()
            # Weights of bfloat16 are off by 2^-9 at most, sums in float32 by less than that.
            assert (error <= 2**-8 * (inputs.abs() @ weights.abs().T)).all()
            rows = kernels.embed(matrix, torch.arange(5, dtype=torch.int32))
            torch.testing.assert_close(
                rows, values, rtol=0 if dtype == torch.float32 else 8e-3, atol=0, equal_nan=True
            )
