"""Rotary frequencies against transformers' own functions, from both kinds of file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.errors import ModelError
from polysilicon.models.hf_config import read_rope, rope_parameters, trained_context
from polysilicon.ops import Rope
from polysilicon.weights.fields import Fields

CASES = json.loads((Path(__file__).parents[2] / "fixtures" / "models" / "rope.json").read_text())


def rope_of(
    config: dict[str, Any],
    *,
    head_dim: int = 64,
    max_length: int = 2048,
    kind: str = "full_attention",
) -> Rope:
    fields = Fields(config, "config.json")
    positions = config.get("max_position_embeddings", 2048)
    return read_rope(
        rope_parameters(fields, kind), head_dim=head_dim, positions=positions, max_length=max_length
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["parameters"]["rope_type"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_scalings_equal_transformers(case: dict[str, Any], spelling: str) -> None:
    parameters = dict(case["parameters"])
    positions = case["max_position_embeddings"]
    config = {"max_position_embeddings": positions, spelling: parameters}
    if spelling == "rope_scaling":
        parameters["type"] = parameters.pop("rope_type")
        config["rope_theta"] = parameters.pop("rope_theta")
    rope = rope_of(config, head_dim=case["head_dim"], max_length=case["length"])
    assert rope.dim == case["head_dim"]
    # transformers computes in float32.
    np.testing.assert_allclose(rope.frequencies, case["frequencies"], rtol=2e-6)
    assert rope.scale == pytest.approx(case["scale"], rel=1e-6)
    assert not rope.interleaved


def test_the_fixture_covers_every_scaling() -> None:
    kinds = {case["parameters"]["rope_type"] for case in CASES}
    assert kinds == {"linear", "dynamic", "yarn", "llama3", "longrope"}


def test_default_and_partial_rotation() -> None:
    rope = rope_of({"partial_rotary_factor": 0.5, "rope_theta": 100.0}, head_dim=16)
    assert rope.dim == 8
    np.testing.assert_allclose(rope.frequencies, [1, 100**-0.25, 0.1, 100**-0.75])
    assert rope.scale == 1


def test_parameters_may_be_nested_by_kind_of_layer() -> None:
    config = {
        "rope_theta": 500.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
            "sliding_attention": {"rope_type": "default"},
        },
    }
    full = rope_of(config, head_dim=4)
    sliding = rope_of(config, head_dim=4, kind="sliding_attention")
    np.testing.assert_allclose(full.frequencies, [0.5, 0.05])
    np.testing.assert_allclose(sliding.frequencies, [1, 500**-0.5])


def test_an_original_context_beside_the_scaling_has_priority() -> None:
    factors = {"long_factor": [4.0] * 4, "short_factor": [2.0] * 4}
    config = {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rope_scaling": {"type": "su", "original_max_position_embeddings": 32, **factors},
    }
    long = rope_of(config, head_dim=8, max_length=20)
    short = rope_of(config, head_dim=8, max_length=16)
    assert long.frequencies[0] == 0.25
    assert short.frequencies[0] == 0.5
    assert long.scale == short.scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


@pytest.mark.parametrize(
    ("scaling", "positions", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 100, 400),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400, 400),
        ({"type": "linear", "factor": 4.0}, 100, 100),
        ({"type": "dynamic", "factor": 4.0}, 100, 100),
    ],
)
def test_context_that_a_scaling_is_good_for(scaling: object, positions: int, expected: int) -> None:
    fields = Fields({"rope_scaling": scaling}, "config.json")
    parameters = rope_parameters(fields, "full_attention")
    assert trained_context(parameters, positions) == expected


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"type": "spiral"}, "rope_type"),
        ({"type": 3}, "type"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": 0}, "factor"),
        ({"type": "linear", "factor": -2.0}, "factor"),
        ({"type": "linear", "factor": "8"}, "factor"),
        ({"type": "linear", "factor": float("nan")}, "factor"),
        ({"type": "linear", "factor": float("inf")}, "factor"),
        ({"type": "dynamic", "factor": True}, "factor"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": float("nan")}, "beta_fast"),
        ({"type": "yarn", "factor": 2.0, "beta_slow": [1]}, "beta_slow"),
        ({"type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
        (
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
        ),
        ({"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0}, "high_freq_factor"),
        (
            {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor",
        ),
        ({"type": "longrope", "long_factor": [1.0] * 31}, "long_factor"),
        ({"type": "longrope", "long_factor": "1" * 32}, "long_factor"),
        ({"type": "longrope", "long_factor": [0.0] * 32}, "long_factor"),
        (
            {"type": "longrope", "long_factor": [1.0] * 32, "short_factor": [float("nan")] * 32},
            "short_factor",
        ),
        (
            {"type": "longrope", "original_max_position_embeddings": 1},
            "original_max_position_embeddings",
        ),
        ("linear", "rope_scaling"),
        ({"type": "default", "partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"type": "default", "rope_theta": 1.0}, "rope_theta"),
        ({"type": "default", "rope_theta": -1e4}, "rope_theta"),
    ],
)
def test_hostile_parameters_name_the_field(scaling: object, field: str) -> None:
    with pytest.raises(ModelError, match=field):
        rope_of({"rope_scaling": scaling})


def test_yarn_stays_finite_at_the_ends_of_its_ranges() -> None:
    for base in (1.1, 1e4, 1e30):
        for original in (1, 2048, (1 << 31) - 1):
            for beta in (1e-6, 1.0, 1e6):
                scaling = {
                    "type": "yarn",
                    "factor": 4.0,
                    "beta_fast": beta,
                    "rope_theta": base,
                    "original_max_position_embeddings": original,
                }
                frequencies = np.array(rope_of({"rope_scaling": scaling}).frequencies)
                assert np.isfinite(frequencies).all()
                assert (frequencies >= 0).all()
