"""Mixtures of experts in Triton's interpreter: routing, sorting, and the whole op."""

import dataclasses

import numpy as np
import pytest
import torch

from polysilicon.backend import Dense, Routing
from polysilicon.reference.device import ReferenceDevice
from polysilicon.reference.handles import place
from polysilicon.reference.moe import route as reference_route
from polysilicon.testing import encoded
from polysilicon_torch.packing import place_matrices
from polysilicon_torch.target import INTERPRETER
from polysilicon_torch.triton import moe as launchers
from polysilicon_torch.triton.moe import moe
from polysilicon_torch.triton.moe_routing import route, sort_by_expert
from polysilicon_torch.tuning import Tuning

TUNING = (
    Tuning.of(INTERPRETER)
    .over("packed_product", {"BLOCK_N": 16, "BLOCK_K": 64})
    .over("dense_experts", {"BLOCK_N": 16, "BLOCK_K": 32})
    .over("moe_sort", {"BLOCK_M": 16, "BLOCK": 32})
    .over("moe_combine", {"BLOCK": 32})
)
SCORINGS = ("softmax", "softmax_top_k", "sigmoid")


@pytest.fixture
def rng():
    return np.random.default_rng()


def check_route(logits, routing, correction=None):
    """Experts and weights as the reference has them."""
    placed = None
    if correction is not None:
        placed = place([Dense(array=correction)], None)
    expected, weights = reference_route(logits, dataclasses.replace(routing, correction=placed))
    given = None if correction is None else torch.from_numpy(correction)
    actual, actual_weights = route(torch.from_numpy(logits), routing, given, tuning=TUNING)
    np.testing.assert_array_equal(actual.numpy(), expected)
    np.testing.assert_allclose(actual_weights.numpy(), weights, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (12, 5), (6, 6)])
def test_route(rng, experts, top_k, renormalize, scoring):
    logits = rng.permuted(np.linspace(-3, 3, experts * 4, dtype=np.float32)).reshape(4, experts)
    routing = Routing(top_k=top_k, scoring=scoring, renormalize=renormalize, scale=1.5)
    check_route(logits, routing)
    check_route(logits, routing, rng.permuted(np.linspace(-2, 2, experts, dtype=np.float32)))


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "top_k"),
    [(16, 4, 2, 4), (12, 3, 1, 4), (12, 3, 1, 6), (6, 6, 2, 3), (16, 2, 2, 5)],
)
def test_route_by_groups(rng, experts, groups, top_groups, top_k, corrected):
    """Also where more experts are wanted than the best groups have."""
    logits = rng.permuted(np.linspace(-3, 3, experts * 4, dtype=np.float32)).reshape(4, experts)
    routing = Routing(top_k=top_k, scoring="sigmoid", groups=groups, top_groups=top_groups)
    correction = rng.permuted(np.linspace(-1, 1, experts, dtype=np.float32)) if corrected else None
    check_route(logits, routing, correction)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_equal_scores_prefer_the_lower_expert(scoring):
    logits = np.zeros((4, 8), np.float32)
    logits[0, 4:] = -0.0
    logits[1, 3:] = 1
    logits[2, [1, 6]] = -1
    check_route(logits, Routing(top_k=3, scoring=scoring))
    check_route(logits, Routing(top_k=3, scoring=scoring, groups=4, top_groups=2))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_any_logits_choose_distinct_experts(rng, scoring):
    """Rows of padding may hold anything."""
    logits = rng.choice(np.array([np.nan, np.inf, -np.inf, 0, 3e38], np.float32), (32, 6))
    experts, _ = route(
        torch.from_numpy(logits), Routing(top_k=4, scoring=scoring), None, tuning=TUNING
    )
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in experts.tolist())


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 8), (40, 3), (100, 5), (70, 16), (33, 1)])
def test_sort(rng, rows, count):
    experts = rng.integers(0, count, rows).astype(np.int32)
    experts[: rows // 2] = count - 1
    sorted_rows, ends, block = sort_by_expert(torch.from_numpy(experts), count, tuning=TUNING)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        own = np.flatnonzero(experts == expert).tolist()
        assert end - begin == -(-len(own) // block) * block
        assert sorted_rows[begin:end].tolist() == own + [rows] * (end - begin - len(own))
        begin = end
    assert begin <= len(sorted_rows)


def check_moe(rng, kinds, *, rows=9, experts=4, routing, dtype=torch.float32, biases=False,
              activation="silu", bound=2e-5, sizes=(64, 48)):  # fmt: skip
    """The op against the reference device's, in float64 enough: float32 of dequantised weights."""
    width, inner = sizes
    shapes = ((experts, inner, width), (experts, inner, width), (experts, width, inner))
    gate, up, down = (
        encoded.of_kind(kind)(rng, shape).weight for kind, shape in zip(kinds, shapes, strict=True)
    )
    x = torch.from_numpy(rng.standard_normal((rows, width), np.float32)).to(dtype)
    logits = rng.permuted(np.linspace(-2, 2, rows * experts, dtype=np.float32))
    logits = logits.reshape(rows, experts)
    up_bias, down_bias = (
        rng.standard_normal(shape, np.float32) if biases else None
        for shape in ((experts, 2 * inner), (experts, width))
    )
    device = ReferenceDevice()
    expected = device.ops.moe(
        x.float().numpy(), logits, device.put([gate, up]), device.put([down]),
        routing=routing, activation=activation,
        gate_up_bias=None if up_bias is None else device.put([Dense(array=up_bias)]),
        down_bias=None if down_bias is None else device.put([Dense(array=down_bias)]),
    )  # fmt: skip
    put = {"dtype": dtype, "device": torch.device("cpu"), "keep_codes": True}
    actual = moe(
        x,
        torch.from_numpy(logits),
        [matrix for matrix, _ in place_matrices([gate, up], None, **put)],
        place_matrices([down], None, **put)[0][0],
        routing,
        None,
        activation,
        None if up_bias is None else torch.from_numpy(up_bias),
        None if down_bias is None else torch.from_numpy(down_bias),
        tuning=TUNING,
    )
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert np.abs(actual.numpy() - expected).max(initial=0) <= bound * np.abs(expected).max(
        initial=0
    )


@pytest.mark.parametrize(
    "kind",
    ["dense:f32", "affine:4/16", "affine:8/16", "affine:6/16", "affine:3/16", "float:f4_e2m1/16",
     "float:f8_e4m3/48", "float:codebook:16/16"],
)  # fmt: skip
def test_encodings(rng, kind):
    if kind.endswith("/48"):
        check_moe(rng, (kind,) * 3, routing=Routing(top_k=2), sizes=(48, 48))
    else:
        check_moe(rng, (kind,) * 3, routing=Routing(top_k=2))


def test_parts_of_unlike_encodings(rng):
    """Two stacks for gate and up; biases are cut between them."""
    kinds = ("affine:4/16", "dense:f32", "affine:6/16")
    check_moe(rng, kinds, routing=Routing(top_k=2), biases=True)


@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_rows(rng, rows):
    check_moe(rng, ("affine:4/16",) * 3, rows=rows, routing=Routing(top_k=3))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_biases(rng, activation):
    kinds = ("affine:4/16",) * 3
    routing = Routing(top_k=2, scoring="softmax_top_k")
    check_moe(rng, kinds, routing=routing, activation=activation, biases=True)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_dtypes(rng, dtype, bound):
    for kind in ("dense:f16", "affine:4/16"):
        check_moe(rng, (kind,) * 3, routing=Routing(top_k=2), dtype=dtype, bound=bound)


def test_which_kernels_run(rng, monkeypatch):
    """Packed stacks are never dequantised."""
    monkeypatch.setattr(launchers, "dense_experts_product", None)
    check_moe(rng, ("affine:4/16",) * 3, routing=Routing(top_k=2))
