"""Products of the native library against float64, at every level that runs here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from polysilicon.backend import GroupAffine, GroupFloat, SuperScaled, Weight, pack_codes
from polysilicon.testing import encoded
from polysilicon_cpu import library

try:
    library.load()
except library.LibraryError as failure:
    pytest.skip(str(failure), allow_module_level=True)

from polysilicon_cpu import levels
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.handles import MatrixHandle
from polysilicon_cpu.native import products
from polysilicon_cpu.options import Options

LEVELS = [level for level in levels.built() if levels.failure(level) is None]
ACTIVATIONS = ("f32", "bf16", "int8", "auto")


def _load_random() -> ModuleType:
    path = Path(__file__).parents[3] / "ci" / "cpu_random_products.py"
    spec = importlib.util.spec_from_file_location("cpu_random_products", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_random_products"] = module
    spec.loader.exec_module(module)
    return module


RANDOM = _load_random()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=ACTIVATIONS)
def device(request: pytest.FixtureRequest, level: str) -> Iterator[CPUDevice]:
    device = CPUDevice(Options(level=level, threads=2, activations=request.param))
    yield device
    device.close()


@pytest.fixture(params=ACTIVATIONS)
def deterministic(request: pytest.FixtureRequest, level: str) -> Iterator[CPUDevice]:
    options = Options(level=level, threads=2, activations=request.param, deterministic=True)
    device = CPUDevice(options)
    yield device
    device.close()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def put(device: CPUDevice, *parts: Weight) -> MatrixHandle:
    handle = device.put(parts)
    assert isinstance(handle, MatrixHandle)
    return handle


def test_random_products() -> None:
    """Some of what ci/cpu_random_products.py checks by the million."""
    seed = int(np.random.default_rng().integers(1 << 32))
    assert RANDOM.run(400, seed, seconds=60) >= 4


def rows_apart(device: CPUDevice, handle: MatrixHandle, x: products.Float32, size: int):
    """The products of x, so many rows at a time."""
    chunks = [products.linear(device, handle, x[i : i + size]) for i in range(0, len(x), size)]
    return np.concatenate(chunks)


@pytest.mark.parametrize("kind", ["affine:4/32", "affine:6/16", "affine:8/128", "float:f4_e2m1/32",
                                  "dense:f16", "dense:bf16", "dense:f32"])  # fmt: skip
def test_rows_do_not_depend_on_each_other(
    deterministic: CPUDevice, rng: np.random.Generator, kind: str
) -> None:
    """Bitwise, alone, in chunks of 7, and in a batch of any size."""
    device = deterministic
    handle = put(device, encoded.of_kind(kind)(rng, (77, 384)).weight)
    x = rng.standard_normal((70, 384), np.float32)
    together = products.linear(device, handle, x)
    for size in (1, 2, 5, 7, 9, 17, 33):
        np.testing.assert_array_equal(rows_apart(device, handle, x, size), together)


def test_int8_and_bf16_activations_differ_only_in_rounding(
    device: CPUDevice, rng: np.random.Generator
) -> None:
    """Inputs that both hold exactly give what float32 gives, whatever the rounding."""
    part = encoded.affine(rng, (50, 320), 4, 32, "bias")
    x = rng.integers(-127, 128, (9, 320)).astype(np.float32)
    x[:, ::32] = 127
    handle = put(device, part.weight)
    expected = x.astype(np.float64) @ part.values.T
    actual = products.linear(device, handle, x)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(x).sum(1).max())


@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("group", [16, 32])
def test_auto_keeps_small_inputs_beside_large_ones(
    level: str, rng: np.random.Generator, group: int, rows: int
) -> None:
    """int8 loses inputs that share a scale with one a thousand times as large; `auto` does not."""
    part = encoded.affine(rng, (50, 320), 5, group, "offset")
    x = rng.standard_normal((rows, 320), np.float32)
    outliers = rng.integers(0, 320, rows)
    large = np.zeros_like(x)
    large[np.arange(rows), outliers] = 1000.0
    x[np.arange(rows), outliers] = 0.0
    expected = (x + large).astype(np.float64) @ part.values.T
    device = CPUDevice(Options(level=level, threads=2, activations="auto"))
    actual = products.linear(device, put(device, part.weight), x + large)
    device.close()
    # Each input errs by at most half a step of the two bytes; Hoeffding's inequality bounds what
    # they sum to, exceeded once in 1e12 outputs. int8 alone would err by 256 times as much.
    step = 1000 / 127 / 256
    bound = 3.8 * step * np.linalg.norm(part.values, axis=1).max()
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=bound)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("bits", range(2, 9))
def test_size_stays_that_of_the_codes(
    device: CPUDevice, rng: np.random.Generator, bits: int, rows: int
) -> None:
    """A weight of whole tiles takes its own bytes and nothing more."""
    part = encoded.affine(rng, (16 * rows, 2048), bits, 32, "bias")
    assert put(device, part.weight).nbytes == part.weight.nbytes


def test_super_scales_stay_codes(device: CPUDevice, rng: np.random.Generator) -> None:
    """K-quants: a byte for each scale's code, and a number for each super-scale."""
    codes = rng.integers(0, 64, (32, 64), np.uint8)
    scale = SuperScaled(
        codes=pack_codes(codes, 6),
        bits=6,
        offset=0,
        count=64,
        scale=rng.random((32, 4)).astype(np.float16),
        group=16,
    )
    part = GroupAffine(
        shape=(32, 1024),
        bits=6,
        group=16,
        codes=pack_codes(rng.integers(0, 64, (32, 1024), np.uint8), 6),
        scale=scale,
        offset=32,
    )
    handle = put(device, part)
    assert handle.nbytes == 32 * (1024 * 6 // 8 + 64 + 4 * 2)
    np.testing.assert_array_equal(handle.values(), part.dequantize())


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-20, 1e20, 1e30])
def test_extreme_inputs(device: CPUDevice, rng: np.random.Generator, value: float) -> None:
    part = encoded.affine(rng, (17, 64), 4, 32, "offset")
    x = np.full((3, 64), value, np.float32)
    actual = products.linear(device, put(device, part.weight), x)
    expected = x.astype(np.float64) @ part.values.T
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02 * max(64 * value, 1e-30))


def test_one_bad_row_does_not_spread(device: CPUDevice, rng: np.random.Generator) -> None:
    """A row of NaN leaves the others as they are."""
    handle = put(device, encoded.affine(rng, (40, 128), 5, 32, "bias").weight)
    x = rng.standard_normal((12, 128), np.float32)
    clean = products.linear(device, handle, x)
    x[5] = np.nan
    spoiled = products.linear(device, handle, x)
    others = np.arange(12) != 5
    np.testing.assert_array_equal(spoiled[others], clean[others])


def test_input_orders_that_differ(device: CPUDevice, rng: np.random.Generator) -> None:
    """Fused parts with orders of their own, and one with none."""
    parts = [
        encoded.affine(rng, (20, 128), 4, 32, variant)
        for variant in ("input_order", "bias", "input_order")
    ]
    handle = put(device, *(part.weight for part in parts))
    values = np.concatenate([part.values for part in parts])
    x = rng.standard_normal((11, 128), np.float32)
    expected = x.astype(np.float64) @ values.T
    actual = products.linear(device, handle, x)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    np.testing.assert_array_equal(
        handle.values(), np.concatenate([part.weight.dequantize() for part in parts])
    )


def test_small_codebooks(device: CPUDevice, rng: np.random.Generator) -> None:
    """A table that has fewer entries than its codes could name."""
    table = rng.standard_normal(11).astype(np.float32)
    codes = rng.integers(0, 11, (19, 64), np.uint8)
    part = GroupFloat(
        shape=(19, 64),
        format="codebook",
        group=32,
        codes=pack_codes(codes, 4),
        scale=np.ones((19, 2), np.float32),
        table=table,
    )
    np.testing.assert_array_equal(put(device, part).values(), part.dequantize())


@pytest.mark.parametrize("columns", [16, 48, 80])
def test_nothing_past_the_last_group_is_read(
    device: CPUDevice, rng: np.random.Generator, columns: int
) -> None:
    """What an earlier product left in the scratch memory, NaN here, does not come in."""
    spoiled = encoded.affine(rng, (64, 128), 4, 16, "bias").weight
    assert isinstance(spoiled, GroupAffine)
    assert isinstance(spoiled.scale, np.ndarray)
    assert isinstance(spoiled.bias, np.ndarray)
    spoiled.scale[:] = spoiled.bias[:] = np.nan
    spoiled_handle = put(device, spoiled)
    part = encoded.affine(rng, (33, columns), 8, 16, "bias")
    handle = put(device, part.weight)
    for rows in (1, 7, 30):
        x = rng.standard_normal((rows, 128), np.float32)
        products.linear(device, spoiled_handle, x)
        actual = products.linear(device, handle, x[:, :columns])
        wide = x[:, :columns].astype(np.float64)
        allowed = RANDOM.largest_error(wide, part.values, device.options.activations)
        assert (np.abs(actual - wide @ part.values.T) <= allowed).all()
