"""Numbers in config.json that Python's own arithmetic cannot take."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polysilicon.errors import ModelError
from polysilicon.models.loading import read_config
from polysilicon.weights.checkpoint import open_checkpoint

from .conftest import Tiny, WriteSafetensors

ROPE = {"factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "yarn", "beta_fast": 1e-320}, "beta_fast"),
        ({"rope_type": "yarn", "beta_slow": 5e-324}, "beta_slow"),
        *(
            (
                {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
                | {name: [value] * 4},
                name,
            )
            for name in ("short_factor", "long_factor")
            for value in (10**400, 1e-320, math.inf, math.nan, 0, -1.0)
        ),
    ],
)
def test_rope_scaling(
    scaling: dict[str, Any], field: str, tiny: Tiny, write_safetensors: WriteSafetensors
) -> None:
    model = tiny("llama")
    config = {**model.legacy, "rope_scaling": ROPE | scaling}
    with (
        open_checkpoint(write_safetensors(config, model.weights)) as opened,
        pytest.raises(ModelError, match=field),
    ):
        read_config(opened)


def test_a_beta_of_zero_counts_as_missing(tiny: Tiny, write_safetensors: WriteSafetensors) -> None:
    model = tiny("llama")
    ropes = []
    for beta in ({}, {"beta_fast": 0, "beta_slow": 0.0}):
        config = {**model.legacy, "rope_scaling": ROPE | {"rope_type": "yarn"} | beta}
        with open_checkpoint(write_safetensors(config, model.weights)) as opened:
            ropes.append(read_config(opened)[1].ropes)
    assert ropes[0] == ropes[1]
