"""Norms, activations and the other ops that work element by element or row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import Batch, Ops, Rope
from polysilicon.testing import encoded, oracles
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import FLOAT32_BOUND, Kit, assert_close

ROW_COUNTS = (1, 2, 7, 33, 130)
WIDTHS = (1, 5, 64, 577)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_embed(kit: Kit, dtype: str, width: int) -> None:
    table = encoded.of_kind(f"dense:{dtype}")(kit.rng, (97, width))
    handle = kit.put(table.weight)
    for count in ROW_COUNTS:
        tokens = kit.rng.integers(0, 97, count)
        batch = kit.rows(tokens)
        [actual] = kit.evaluate(lambda ops, batch: ops.embed(handle, batch.tokens), batch)
        assert_close(actual, table.values[tokens], kit.bound)


@pytest.mark.parametrize(
    "kind", ["affine:2/16", "affine:4/32", "affine:6/16", "affine:8/32", "float:f8_e4m3/128"]
)
def test_embed_quantised(kit: Kit, kind: str) -> None:
    table = encoded.of_kind(kind)(kit.rng, (61, 256))
    handle = kit.put(table.weight)
    tokens = [60, 0, 5, 5, 31]
    [actual] = kit.evaluate(lambda ops, batch: ops.embed(handle, batch.tokens), kit.rows(tokens))
    assert_close(actual, table.values[tokens], kit.bound)


@pytest.mark.parametrize("width", WIDTHS)
def test_select(kit: Kit, width: int) -> None:
    """Any rows in any order, and none."""
    x, values = kit.dense(kit.normal(33, width))
    for rows in ([0], [32], [5, 5, 0, 31], list(range(33)), []):
        batch = make_batch([Chunk(tokens=range(33))], logit_rows=rows)
        [actual] = kit.evaluate(lambda ops, batch: ops.embed(x, batch.tokens), batch)
        assert_close(actual, values[rows], kit.bound)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(kit: Kit, residual: bool, width: int) -> None:
    x, x_values = kit.dense(kit.exact(130, width))
    r, r_values = kit.dense(kit.exact(130, width))
    weight, w_values = kit.dense(kit.normal(width))

    def computation(ops: Ops, batch: Batch) -> Any:
        other = ops.embed(r, batch.tokens) if residual else None
        return ops.rms_norm(ops.embed(x, batch.tokens), weight, eps=1e-5, residual=other)

    for count in ROW_COUNTS:
        tokens = np.arange(count)
        normal, hidden = kit.evaluate(computation, kit.rows(tokens), outputs=2)
        expected = x_values[tokens] + (r_values[tokens] if residual else 0)
        assert_close(normal, oracles.rms_norm(expected, w_values, 1e-5), kit.bound)
        assert_close(hidden, expected, FLOAT32_BOUND)


@pytest.mark.parametrize("width", [2, *WIDTHS[1:]])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_layer_norm(kit: Kit, residual: bool, bias: bool, width: int) -> None:
    x, x_values = kit.dense(kit.exact(33, width) + np.float32(4))
    r, r_values = kit.dense(kit.exact(33, width))
    weight, w_values = kit.dense(kit.normal(width))
    b, b_values = kit.dense(kit.normal(width))

    def computation(ops: Ops, batch: Batch) -> Any:
        other = ops.embed(r, batch.tokens) if residual else None
        own_bias = b if bias else None
        return ops.layer_norm(
            ops.embed(x, batch.tokens), weight, own_bias, eps=1e-5, residual=other
        )

    normal, hidden = kit.evaluate(computation, kit.rows(range(33)), outputs=2)
    expected = x_values + (r_values if residual else 0)
    own_bias = b_values if bias else None
    assert_close(normal, oracles.layer_norm(expected, w_values, own_bias, 1e-5), kit.bound)
    assert_close(hidden, expected, FLOAT32_BOUND)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_norms_of_small_and_large_rows(kit: Kit, size: float, eps: float) -> None:
    """Where eps decides, and where the squares would leave half precision."""
    x, values = kit.dense(kit.normal(5, 128, scale=size))
    weight, w_values = kit.dense(kit.normal(128))

    def computation(ops: Ops, batch: Batch) -> Any:
        return ops.rms_norm(ops.embed(x, batch.tokens), weight, eps=eps)

    [actual] = kit.evaluate(computation, kit.rows(range(5)))
    assert_close(actual, oracles.rms_norm(values, w_values, eps), kit.bound)


def test_residual_stream_is_float32(kit: Kit) -> None:
    """Small contributions to a large residual are not rounded away, one after the other."""
    large, large_values = kit.dense(np.full((4, 32), 512, np.float32))
    small, small_values = kit.dense(kit.exact(4, 32) / np.float32(16))
    weight, _ = kit.dense(np.ones(32, np.float32))

    def computation(ops: Ops, batch: Batch) -> Any:
        total = ops.embed(large, batch.tokens)
        increment = ops.embed(small, batch.tokens)
        for _ in range(8):
            total = ops.add(total, increment)
        for _ in range(8):
            _, total = ops.rms_norm(increment, weight, eps=1e-5, residual=total)
        for _ in range(8):
            _, total = ops.layer_norm(increment, weight, eps=1e-5, residual=total)
        return total

    [actual] = kit.evaluate(computation, kit.rows(range(4)))
    assert_close(actual, large_values + 24 * small_values, FLOAT32_BOUND)


@pytest.mark.parametrize("width", WIDTHS)
def test_add(kit: Kit, width: int) -> None:
    a, a_values = kit.dense(kit.exact(7, width))
    b, b_values = kit.dense(kit.exact(7, width) * np.float32(64))
    [actual] = kit.evaluate(
        lambda ops, batch: ops.add(ops.embed(a, batch.tokens), ops.embed(b, batch.tokens)),
        kit.rows(range(7)),
    )
    assert_close(actual, a_values + b_values, FLOAT32_BOUND)


@pytest.mark.parametrize("factor", [0.0, -1.5, 1 / 3, math.sqrt(640)])
def test_scale(kit: Kit, factor: float) -> None:
    x, values = kit.dense(kit.normal(7, 33))
    [actual] = kit.evaluate(
        lambda ops, batch: ops.scale(ops.embed(x, batch.tokens), factor), kit.rows(range(7))
    )
    assert_close(actual, values * factor, kit.bound)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_softcap(kit: Kit, cap: float) -> None:
    x, values = kit.dense(kit.normal(7, 33, scale=cap))
    [actual] = kit.evaluate(
        lambda ops, batch: ops.softcap(ops.embed(x, batch.tokens), cap), kit.rows(range(7))
    )
    assert_close(actual, cap * np.tanh(values / cap), kit.bound)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"])
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_act(kit: Kit, width: int, kind: str) -> None:
    gate, gate_values = kit.dense(kit.normal(33, width, scale=4))
    up, up_values = kit.dense(kit.normal(33, width, scale=4))
    [actual] = kit.evaluate(
        lambda ops, batch: ops.gated_act(
            ops.embed(gate, batch.tokens), ops.embed(up, batch.tokens), kind
        ),
        kit.rows(range(33)),
    )
    assert_close(actual, oracles.gated_act(gate_values, up_values, kind), kit.bound)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"])
def test_gated_act_saturates(kit: Kit, kind: str) -> None:
    """Gates whose exponentials overflow."""
    gates = np.array([[-200, -95, -30, -8, 0, 8, 30, 95, 200]], np.float32)
    gate, gate_values = kit.dense(gates)
    up, up_values = kit.dense(np.ones_like(gates))
    [actual] = kit.evaluate(
        lambda ops, batch: ops.gated_act(
            ops.embed(gate, batch.tokens), ops.embed(up, batch.tokens), kind
        ),
        kit.rows([0]),
    )
    assert_close(actual, oracles.gated_act(gate_values, up_values, kind), kit.bound)


def test_swiglu_oai_bounds_gates_from_above_only(kit: Kit) -> None:
    """Gates below -7, where the product is small but not what it is at -7."""
    gate, gate_values = kit.dense(np.array([[-7.5, -7.25, -7.375]], np.float32))
    up, up_values = kit.dense(np.full((1, 3), 7, np.float32))
    [actual] = kit.evaluate(
        lambda ops, batch: ops.gated_act(
            ops.embed(gate, batch.tokens), ops.embed(up, batch.tokens), "swiglu_oai"
        ),
        kit.rows([0]),
    )
    # The exponential of an argument near 13 magnifies the argument's rounding.
    expected = oracles.gated_act(gate_values, up_values, "swiglu_oai")
    assert_close(actual, expected, 7 * kit.bound)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("head", "dim"), [(64, 64), (64, 16), (80, 32), (128, 128), (6, 2)])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_rope(kit: Kit, scale: float, heads: int, head: int, dim: int, interleaved: bool) -> None:
    """Whole and partial rotation, positions near and far, in no order."""
    frequencies = tuple(10000.0 ** (-np.arange(0, dim, 2) / dim))
    rope = Rope(dim=dim, frequencies=frequencies, scale=scale, interleaved=interleaved)
    positions = [0, 1, 2, 131_071, 4095, 17, 17]
    x, values = kit.dense(kit.normal(len(positions), heads * head))
    [actual] = kit.evaluate(
        lambda ops, batch: ops.rope(ops.embed(x, batch.tokens), batch.positions, rope, heads=heads),
        make_batch([Chunk(tokens=range(len(positions)), positions=positions)]),
    )
    by_head = values.reshape(-1, heads, head)
    expected = oracles.rotate(by_head, positions, rope).reshape(len(positions), -1)
    for row, position in enumerate(positions):
        own = slice(row, row + 1)
        assert_close(actual[own], expected[own], kit.bound + oracles.angle_error(position))


def test_ops_of_one_rank(kit: Kit) -> None:
    """With one rank the collective ops give back what they got."""
    x, values = kit.dense(kit.normal(3, 8))

    def computation(ops: Ops, batch: Batch) -> Any:
        return ops.all_gather(ops.all_reduce(ops.embed(x, batch.tokens)))

    [actual] = kit.evaluate(computation, kit.rows(range(3)))
    assert_close(actual, values, kit.bound)
