"""What MLX is given multiplies as the canonical encodings say."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip(
    "mlx.core", reason="mlx is not installed: pip install 'polysilicon[metal]'"
)

from polysilicon.backend import Dense, GroupFloat, pack_codes  # noqa: E402
from polysilicon.testing import encoded  # noqa: E402
from polysilicon_metal.products import PackedSegment, Precision  # noqa: E402
from polysilicon_metal.quantization import cut_columns, fuse, pack  # noqa: E402

EXACT = Precision(rounding=None, on_gpu=False)


def values_of(packed):
    """All rows, as the device reads them."""
    segment = PackedSegment(packed, EXACT)
    return np.array(segment.rows(mx.arange(segment.outputs)))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 128, 256])
def test_affine_weights_are_exact(bits, group):
    """With a scale and a bias whose products and sums float32 holds."""
    rng = np.random.default_rng()
    columns = 3 * group if group < 256 else 512
    weight = encoded.affine(rng, (5, columns), bits, group, "offset").weight
    packed = pack(weight)
    assert packed is not None
    assert packed.mode == "affine"
    assert len(packed.scales) == (2 if group % 32 else 1)
    np.testing.assert_array_equal(values_of(packed), weight.dequantize())


def test_odd_groups_are_expanded():
    weight = encoded.affine(np.random.default_rng(), (5, 60), 4, 20).weight
    assert pack(weight) is None


def float_weight(format, group, scale, rows=3):
    bits = 4 if format == "f4_e2m1" else 8
    columns = group * scale.shape[1]
    codes = np.random.default_rng().integers(0, 1 << bits, (rows, columns), np.uint8)
    if bits == 8:
        codes[codes & 0x7F == 0x7F] = 0
    return GroupFloat(
        shape=(rows, columns), format=format, group=group, codes=pack_codes(codes, bits),
        scale=scale,
    )  # fmt: skip


@pytest.mark.parametrize(("format", "mode"), [("f4_e2m1", "mxfp4"), ("f8_e4m3", "mxfp8")])
def test_powers_of_two_are_microscaling_scales(format, mode):
    exponents = np.array([[-126, 0, 5], [-1, 100, -20], [3, -3, 1]], np.float32)
    weight = float_weight(format, 32, np.exp2(exponents))
    packed = pack(weight)
    assert packed.mode == mode
    np.testing.assert_array_equal(values_of(packed), weight.dequantize())


@pytest.mark.parametrize("factor", [1.0, 0.0123, 3.0e-4])
def test_scales_of_e4m3_are_nvfp4(factor):
    rng = np.random.default_rng()
    # A NVFP4 checkpoint's largest scale fills e4m3's range.
    steps = np.arange(126, dtype=np.uint8).view(np.uint8)
    table = pack_table()
    scale = table[rng.choice(steps, (3, 4))]
    scale[0, 0] = 448
    weight = float_weight("f4_e2m1", 16, (scale * np.float32(factor)).astype(np.float32))
    packed = pack(weight)
    assert packed.mode == "nvfp4"
    np.testing.assert_allclose(values_of(packed), weight.dequantize(), rtol=1e-6)


def pack_table():
    """The values of e4m3 from 0 to 448, by code, from their definition."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    ).astype(np.float32)


@pytest.mark.parametrize("group", [16, 32, 64])
def test_other_scales_of_fp4_are_affine(group):
    scale = np.random.default_rng().uniform(0.5, 2, (3, 4)).astype(np.float32)
    weight = float_weight("f4_e2m1", group, scale)
    packed = pack(weight)
    assert (packed.mode, packed.bits) == ("affine", 5)
    np.testing.assert_allclose(values_of(packed), weight.dequantize(), atol=2e-6)


def test_parts_that_fit_become_one():
    rng = np.random.default_rng()
    first, second = (encoded.affine(rng, (n, 64), 4, 32).weight for n in (5, 3))
    packed = [pack(first), pack(second)]
    assert packed[0].fits(packed[1])
    whole = values_of(fuse(packed))
    np.testing.assert_array_equal(whole, [*values_of(packed[0]), *values_of(packed[1])])
    for other in (
        encoded.affine(rng, (3, 64), 8, 32).weight,
        encoded.affine(rng, (3, 64), 4, 64).weight,
        encoded.affine(rng, (3, 64), 4, 16).weight,
        encoded.affine(rng, (3, 64), 4, 32, "input_order").weight,
    ):
        assert not packed[0].fits(pack(other))


@pytest.mark.parametrize("kind", ["affine:4/32", "affine:5/16", "float:f8_e4m3/32", "dense:f16"])
@pytest.mark.parametrize(("begin", "end"), [(32, 96), (0, 128), (3, 50)])
def test_columns(kind, begin, end):
    """Whole groups stay codes; a cut through one gives plain numbers."""
    weight = encoded.of_kind(kind)(np.random.default_rng(), (4, 128)).weight
    part = cut_columns(weight, begin, end)
    assert isinstance(part, Dense) == (begin == 3 or kind.startswith("dense"))
    np.testing.assert_array_equal(part.dequantize(), weight.dequantize()[:, begin:end])
