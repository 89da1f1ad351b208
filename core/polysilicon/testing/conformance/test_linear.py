"""Products with weights of every encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import Batch, Handle, Ops, Shard
from polysilicon.testing import encoded
from polysilicon.testing.encoded import Encoded
from polysilicon.testing.kit import Computation, Kit, as_forward, assert_close

ROW_COUNTS = (1, 2, 7, 33, 130)


def product(x: Handle, weight: Handle, bias: Handle | None = None) -> Computation:
    def computation(ops: Ops, batch: Batch) -> Any:
        return ops.linear(ops.embed(x, batch.tokens), weight, bias=bias)

    return computation


def check_product(
    kit: Kit,
    parts: Sequence[Encoded],
    *,
    bias: npt.NDArray[np.float32] | None = None,
    row_counts: Sequence[int] = ROW_COUNTS,
) -> None:
    """Every part's product, for few and many rows, against float64."""
    weight = kit.put(*(part.weight for part in parts))
    sizes = [part.values.shape[0] for part in parts]
    assert tuple(weight.parts) == tuple(sizes)
    bias_handle, bias_values = (None, np.zeros(sum(sizes))) if bias is None else kit.dense(bias)
    x, x_values = kit.dense(kit.normal(max(row_counts), parts[0].values.shape[1]))
    starts = np.cumsum([0, *sizes])
    for index, part in enumerate(parts):
        program = kit.device.compile(as_forward(product(x, weight, bias_handle), index))
        own_bias = bias_values[starts[index] : starts[index + 1]]
        for count in row_counts:
            tokens = kit.rng.permutation(max(row_counts))[:count]
            actual = program(kit.rows(tokens), None).result().logits
            assert_close(actual, x_values[tokens] @ part.values.T + own_bias, kit.bound)


@pytest.mark.parametrize("shape", [(1, 1), (37, 61), (64, 64), (129, 257), (300, 48)])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dense(kit: Kit, dtype: str, shape: tuple[int, int]) -> None:
    check_product(kit, [encoded.of_kind(f"dense:{dtype}")(kit.rng, shape)])


@pytest.mark.parametrize("variant", encoded.AFFINE_VARIANTS)
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, "row"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_group_affine(kit: Kit, bits: int, group: int | str, variant: str) -> None:
    columns = 101 if group == "row" else max(2 * int(group), 192 // int(group) * int(group))
    span = columns if group == "row" else int(group)
    weight = encoded.affine(kit.rng, (37, columns), bits, span, variant)
    check_product(kit, [weight], row_counts=(1, 7, 33) if variant != "bias" else ROW_COUNTS)


@pytest.mark.parametrize("variant", encoded.FLOAT_VARIANTS)
@pytest.mark.parametrize("group", [16, 32, 128, "row"])
@pytest.mark.parametrize("format", encoded.FLOAT_FORMATS)
def test_group_float(kit: Kit, format: str, group: int | str, variant: str) -> None:
    columns = 101 if group == "row" else 384
    span = columns if group == "row" else int(group)
    weight = encoded.group_float(kit.rng, (37, columns), format, span, variant)
    check_product(kit, [weight], row_counts=(1, 7, 33) if variant != "plain" else ROW_COUNTS)


@pytest.mark.parametrize("group", [16, 32])
def test_codes_of_three_bits(kit: Kit, group: int) -> None:
    """A codebook of 8 entries under super-scales, as GGUF's IQ types come."""
    weight = encoded.group_float(kit.rng, (37, 384), "codebook:8", group, "super_scale")
    check_product(kit, [weight])


@pytest.mark.parametrize("shape", [(64, 128), (37, 101), (33, 65)])
@pytest.mark.parametrize("format", ["f8_e4m3", "f8_e5m2"])
def test_scale_blocks(kit: Kit, format: str, shape: tuple[int, int]) -> None:
    """Two-dimensional scale blocks, cut off at the edges."""
    check_product(kit, [encoded.group_float(kit.rng, shape, format, shape[1], block=(32, 64))])


@pytest.mark.parametrize(
    "kinds",
    [
        ("dense:f32", "dense:f32", "dense:f32"),
        ("dense:f16", "dense:bf16"),
        ("affine:4/32", "affine:4/32", "affine:6/16"),
        ("affine:4/32", "affine:8/32", "dense:f16"),
        ("float:f8_e4m3/128", "affine:5/64"),
        ("float:f4_e2m1/32", "float:f4_e2m1/32"),
    ],
    ids="+".join,
)
def test_fused_parts(kit: Kit, kinds: tuple[str, ...]) -> None:
    """Parts of different sizes and encodings in one handle, with a bias over all of them."""
    rows = (40, 24, 9)
    parts = [
        encoded.of_kind(kind)(kit.rng, (count, 256))
        for kind, count in zip(kinds, rows, strict=False)
    ]
    bias = kit.normal(sum(part.values.shape[0] for part in parts), scale=8)
    check_product(kit, parts, bias=bias)


@pytest.mark.parametrize("count", [1, 3])
def test_bias(kit: Kit, count: int) -> None:
    weight = encoded.dense(kit.rng, (35, 48))
    check_product(kit, [weight], bias=kit.normal(35, scale=20), row_counts=(count,))


@pytest.mark.parametrize("kind", ["dense:f32", "dense:bf16", "affine:4/32", "affine:8/32"])
def test_tied_embedding(kit: Kit, kind: str) -> None:
    """One handle as table and as output matrix."""
    table = encoded.of_kind(kind)(kit.rng, (51, 64))
    handle = kit.put(table.weight)
    tokens = [0, 50, 7, 7, 13]
    [rows] = kit.evaluate(lambda ops, batch: ops.embed(handle, batch.tokens), kit.rows(tokens))
    assert_close(rows, table.values[tokens], kit.bound)
    [actual] = kit.evaluate(product(handle, handle), kit.rows(tokens))
    assert_close(actual, table.values[tokens] @ table.values.T, kit.bound)


@pytest.mark.parametrize("kind", ["dense:f32", "dense:f16", "affine:4/32"])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_shards(kit: Kit, axis: str, kind: str) -> None:
    """The ranks' parts: outputs of every fused part, or inputs whose products add up."""
    parts = [encoded.of_kind(kind)(kit.rng, (count, 128)) for count in (32, 16)]
    x_array = kit.normal(3, 128)
    for rank in range(2):
        shard = Shard(axis=axis, rank=rank, ranks=2)
        weight = kit.put(*(part.weight for part in parts), shard=shard)
        inputs = slice(64 * rank, 64 * rank + 64) if axis == "columns" else slice(None)
        x, x_values = kit.dense(x_array[:, inputs])
        actual = kit.evaluate(product(x, weight), kit.rows(range(3)), outputs=2)
        for part, result in zip(parts, actual, strict=True):
            share = part.values[:, inputs]
            if axis == "rows":
                share = np.split(share, 2)[rank]
            assert_close(result, x_values @ share.T, kit.bound)


def test_vectors_are_sharded_by_rows(kit: Kit) -> None:
    """A bias over two parts is cut as the parts are."""
    parts = [encoded.dense(kit.rng, (count, 16)) for count in (8, 4)]
    biases = [encoded.dense(kit.rng, (count,)) for count in (8, 4)]
    x, x_values = kit.dense(kit.normal(2, 16))
    for rank in range(2):
        shard = Shard(axis="rows", rank=rank, ranks=2)
        weight = kit.put(*(part.weight for part in parts), shard=shard)
        bias = kit.put(*(part.weight for part in biases), shard=shard)
        actual = kit.evaluate(product(x, weight, bias), kit.rows(range(2)), outputs=2)
        for part, own, result in zip(parts, biases, actual, strict=True):
            matrix, vector = np.split(part.values, 2)[rank], np.split(own.values, 2)[rank]
            assert_close(result, x_values @ matrix.T + vector, kit.bound)


def test_given_arrays_are_not_kept(kit: Kit) -> None:
    weight = encoded.dense(kit.rng, (8, 16))
    handle = kit.put(weight.weight)
    weight.weight.array[:] = 0  # type: ignore[attr-defined]
    x, x_values = kit.dense(kit.normal(4, 16))
    [actual] = kit.evaluate(product(x, handle), kit.rows(range(4)))
    assert_close(actual, x_values @ weight.values.T, kit.bound)
