"""Mixtures of experts: how router logits choose, and what the chosen experts compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import Batch, Ops, Routing
from polysilicon.testing import encoded, oracles
from polysilicon.testing.kit import Float64, Kit, assert_close

WIDTH, INNER = 64, 48
MARGIN = 0.05
"""How far apart, of the largest score, the last expert chosen and the first left out must be for a
choice to be the same in every compute dtype."""


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Weights `[E]` of one token's experts, 0 where not chosen, and how close the choice was."""

    weights: Float64
    margin: float


def choose(logits: Float64, routing: Routing, correction: Float64 | None) -> Choice:
    """The routing of one token, from the text of `Routing`."""
    softmax = np.exp(logits - logits.max())
    softmax /= softmax.sum()
    scores = {
        "softmax": softmax,
        "softmax_top_k": logits,
        "sigmoid": oracles.sigmoid(logits),
    }[routing.scoring]
    merit = scores if correction is None else scores + correction
    margins = [np.inf]
    allowed = list(range(len(logits)))
    if routing.groups > 1:
        groups = np.split(np.arange(len(logits)), routing.groups)
        best = 1 if correction is None else 2
        totals = [sum(sorted(merit[group])[-best:]) for group in groups]
        order = sorted(range(len(groups)), key=lambda group: (-totals[group], group))
        if routing.top_groups < len(groups):
            margins.append(
                totals[order[routing.top_groups - 1]] - totals[order[routing.top_groups]]
            )
        allowed = [int(e) for group in order[: routing.top_groups] for e in groups[group]]
    ranked = sorted(allowed, key=lambda expert: (-merit[expert], expert))
    if routing.top_k < len(ranked):
        margins.append(merit[ranked[routing.top_k - 1]] - merit[ranked[routing.top_k]])
    chosen = ranked[: routing.top_k]
    weights = scores[chosen]
    if routing.scoring == "softmax_top_k":
        weights = np.exp(weights - weights.max())
        weights /= weights.sum()
    if routing.renormalize:
        weights = weights / weights.sum()
    result = np.zeros(len(logits))
    result[chosen] = weights * routing.scale
    return Choice(result, min(margins) / max(np.abs(merit).max(), 1e-9))


def clear_logits(
    kit: Kit, count: int, experts: int, routing: Routing, correction: Float64 | None
) -> npt.NDArray[np.float32]:
    """Router logits whose choices are not nearly tied."""
    rows: list[npt.NDArray[np.float32]] = []
    for _ in range(200 * count):
        logits = kit.normal(experts, scale=2)
        if choose(logits.astype(np.float64), routing, correction).margin > MARGIN:
            rows.append(logits)
        if len(rows) == count:
            return np.stack(rows)
    pytest.fail("found too few logits with a clear choice")


def check_moe(
    kit: Kit,
    routing: Routing,
    *,
    experts: int = 8,
    rows: int = 9,
    activation: str = "silu",
    biases: bool = False,
    correction: bool = False,
    kind: str = "dense:f32",
    logits: npt.NDArray[np.float32] | None = None,
) -> None:
    make = encoded.of_kind(kind)
    gate, up, down = (
        make(kit.rng, shape)
        for shape in [(experts, INNER, WIDTH), (experts, INNER, WIDTH), (experts, WIDTH, INNER)]
    )
    gate_up_handle = kit.put(gate.weight, up.weight)
    down_handle = kit.put(down.weight)
    up_bias, up_bias_values = kit.dense(kit.normal(experts, 2 * INNER))
    down_bias, down_bias_values = kit.dense(kit.normal(experts, WIDTH, scale=4))
    correction_values = None
    if correction:
        handle, correction_values = kit.dense(kit.rng.uniform(-0.5, 0.5, experts))
        routing = dataclasses.replace(routing, correction=handle)
    if logits is None:
        logits = clear_logits(kit, rows, experts, routing, correction_values)
    router, router_values = kit.dense(logits)
    x, x_values = kit.dense(kit.normal(len(logits), WIDTH))

    def computation(ops: Ops, batch: Batch) -> Any:
        return ops.moe(
            ops.embed(x, batch.tokens),
            ops.embed(router, batch.tokens),
            gate_up_handle,
            down_handle,
            routing=routing,
            activation=activation,
            gate_up_bias=up_bias if biases else None,
            down_bias=down_bias if biases else None,
        )

    [actual] = kit.evaluate(computation, kit.rows(range(len(logits))))
    expected = np.zeros_like(x_values)
    for row, x_row in enumerate(x_values):
        weights = choose(router_values[row], routing, correction_values).weights
        for expert in np.flatnonzero(weights):
            g, u = gate.values[expert] @ x_row, up.values[expert] @ x_row
            if biases:
                g, u = np.split(np.concatenate([g, u]) + up_bias_values[expert], 2)
            result = down.values[expert] @ oracles.gated_act(g, u, activation)
            if biases:
                result = result + down_bias_values[expert]
            expected[row] += weights[expert] * result
    # Two products, one after the other.
    assert_close(actual, expected, 2 * kit.bound)


SCORINGS = ("softmax", "softmax_top_k", "sigmoid")


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
@pytest.mark.parametrize("renormalize", [False, True])
def test_scoring(kit: Kit, renormalize: bool, top_k: int, scoring: str) -> None:
    check_moe(kit, Routing(top_k=top_k, scoring=scoring, renormalize=renormalize))


@pytest.mark.parametrize("rows", [1, 2, 33, 130])
def test_rows(kit: Kit, rows: int) -> None:
    check_moe(kit, Routing(top_k=2), rows=rows)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_correction(kit: Kit, scoring: str) -> None:
    """Added to choose by and not to weigh by."""
    check_moe(kit, Routing(top_k=3, scoring=scoring), correction=True)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize(("groups", "top_groups"), [(2, 1), (4, 2), (4, 4), (4, 3)])
def test_groups(kit: Kit, groups: int, top_groups: int, correction: bool, scoring: str) -> None:
    routing = Routing(top_k=4, scoring=scoring, groups=groups, top_groups=top_groups, scale=2.5)
    check_moe(kit, routing, experts=16, correction=correction, rows=5)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"])
@pytest.mark.parametrize("biases", [False, True])
def test_activations_and_biases(kit: Kit, biases: bool, activation: str) -> None:
    check_moe(kit, Routing(top_k=2), activation=activation, biases=biases)


@pytest.mark.parametrize("kind", ["dense:f16", "dense:bf16", "affine:4/16", "affine:8/16",
                                  "affine:6/16", "float:f4_e2m1/16"])  # fmt: skip
def test_encodings(kit: Kit, kind: str) -> None:
    check_moe(kit, Routing(top_k=2, scoring="softmax_top_k"), kind=kind)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_equal_scores_prefer_the_lower_expert(kit: Kit, scoring: str) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[1, 3:] = 1
    logits[2, [1, 6]] = -1
    check_moe(kit, Routing(top_k=3, scoring=scoring), logits=logits)


def test_uneven_load(kit: Kit) -> None:
    """Every token to the same experts, and experts without tokens."""
    logits = np.zeros((40, 8), np.float32)
    logits[:, [2, 5]] = 4, 3
    check_moe(kit, Routing(top_k=2), logits=logits)


def test_single_expert(kit: Kit) -> None:
    check_moe(kit, Routing(top_k=1), experts=1)
