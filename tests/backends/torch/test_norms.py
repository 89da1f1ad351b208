"""Norm and activation kernels against float64."""

import numpy as np
import pytest
import torch

from polysilicon.testing import oracles
from polysilicon.testing.kit import COMPUTE_BOUNDS, FLOAT32_BOUND, assert_close
from polysilicon_torch.target import INTERPRETER
from polysilicon_torch.triton import activations, norms
from polysilicon_torch.tuning import Tuning

TUNING = Tuning.of(INTERPRETER).over("gated_act", {"BLOCK": 64})
# A gate far below 0 has an infinite exponential, which numpy remarks on.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def numbers(tensor):
    return tensor.double().numpy()


def columns_of_more(rows, width, dtype):
    """A view whose rows do not lie end to end, as a part of a fused product."""
    return torch.randn(rows, width + 5).to(dtype)[:, 3 : 3 + width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 5, 576, 1025])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_norm(dtype, width, residual, centred):
    x = columns_of_more(3, width, DTYPES[dtype])
    added = columns_of_more(3, width, torch.float32) if residual else None
    weight, bias = torch.randn(2, width)
    settings = {"dtype": DTYPES[dtype], "tuning": TUNING}
    before = numbers(x) + (numbers(added) if residual else 0)
    if centred:
        normal, hidden = norms.layer_norm(x, weight, bias, 1e-5, added, **settings)
        expected = oracles.layer_norm(before, numbers(weight), numbers(bias), 1e-5)
    else:
        normal, hidden = norms.rms_norm(x, weight, 1e-5, added, **settings)
        expected = oracles.rms_norm(before, numbers(weight), 1e-5)
    assert normal.dtype == DTYPES[dtype]
    assert hidden.dtype == torch.float32
    assert_close(numbers(normal), expected, COMPUTE_BOUNDS[dtype])
    assert_close(numbers(hidden), before, FLOAT32_BOUND)


def test_norm_without_bias_and_of_no_rows():
    x = torch.randn(2, 40)
    normal, hidden = norms.layer_norm(
        x, torch.ones(40), None, 1e-6, None, dtype=torch.float32, tuning=TUNING
    )
    expected = oracles.layer_norm(numbers(x), np.ones(40), None, 1e-6)
    assert_close(numbers(normal), expected, COMPUTE_BOUNDS["f32"])
    assert hidden is x
    none, _ = norms.rms_norm(x[:0], torch.ones(40), 1e-6, None, dtype=torch.float16, tuning=TUNING)
    assert none.shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", activations.KINDS)
def test_gated_act(dtype, kind):
    gate, up = (4 * columns_of_more(3, 133, DTYPES[dtype]) for _ in range(2))
    result = activations.gated_act(gate, up, kind, dtype=DTYPES[dtype], tuning=TUNING)
    expected = oracles.gated_act(numbers(gate), numbers(up), kind)
    assert result.is_contiguous()
    assert_close(numbers(result), expected, COMPUTE_BOUNDS[dtype])


@pytest.mark.parametrize("kind", activations.KINDS)
def test_gated_act_saturates(kind):
    gate = torch.tensor([[-300.0, -89, -30, 0, 30, 89, 300]])
    up = torch.full((1, 7), 3.0)
    result = activations.gated_act(gate, up, kind, dtype=torch.float32, tuning=TUNING)
    expected = oracles.gated_act(numbers(gate), numbers(up), kind)
    assert_close(numbers(result), expected, COMPUTE_BOUNDS["f32"])
