"""GPTQ's error feedback, AWQ's scales, and where they go."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from polysilicon.quantization.awq import Scaling, find_scale
from polysilicon.quantization.gptq import DAMPING, curvature, gptq_codes
from polysilicon.quantization.methods import hessian, importance
from polysilicon.quantization.source import ModelSource
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import Dense, Float32
from polysilicon.weights.rtn import Fit, fit_affine, fit_symmetric, fit_zero_point

from .conftest import GEMMA3, LLAMA, Logits, WriteModel

FITS: dict[str, Fit] = {
    "symmetric": functools.partial(fit_symmetric, bits=4, group=32, dtype="f16"),
    "zero point": functools.partial(fit_zero_point, bits=4, group=32, dtype="f16"),
    "affine": functools.partial(fit_affine, bits=3, group=64, dtype="f16"),
}


def correlated(tokens: int, width: int, seed: int) -> Float32:
    """Inputs of a few directions and unequal sizes, as hidden states are."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((tokens, width // 4)) @ random.standard_normal(
        (width // 4, width)
    )
    noise = random.standard_normal((tokens, width))
    return ((mixed + noise) * np.exp(random.standard_normal(width))).astype(np.float32)


def output_error(x: Float32, weight: Float32, held: Float32) -> float:
    return float(np.square(x @ (held - weight).T).sum() / np.square(x @ weight.T).sum())


def test_the_factor_is_that_of_the_inverse() -> None:
    inputs = hessian(correlated(300, 48, 0))
    found = curvature(inputs)
    damped = inputs + np.eye(48) * DAMPING * np.diagonal(inputs).mean()
    inverse = np.linalg.inv(damped[np.ix_(found.order, found.order)])
    upper = found.upper.astype(np.float64)
    np.testing.assert_allclose(np.tril(upper, -1), 0, atol=1e-12)
    np.testing.assert_allclose(upper.T @ upper, inverse, rtol=1e-4, atol=1e-5 * inverse.max())
    assert (np.diff(np.diagonal(inputs)[found.order]) <= 0).all()


@pytest.mark.parametrize("name", FITS)
def test_gptq_changes_outputs_less_than_rounding(name: str) -> None:
    x = correlated(600, 192, 1)
    weight = np.random.default_rng(2).standard_normal((40, 192)).astype(np.float32)
    inputs = hessian(x)
    grid = FITS[name](weight, importance(inputs))
    nearest = grid.weight(grid.nearest(weight)).dequantize()
    fed_back = grid.weight(gptq_codes(weight, grid, curvature(inputs))).dequantize()
    assert output_error(x, weight, fed_back) < 0.7 * output_error(x, weight, nearest)
    fresh = correlated(600, 192, 1)[:300]
    assert output_error(fresh, weight, fed_back) < output_error(fresh, weight, nearest)


def test_gptq_of_uncorrelated_inputs_rounds_to_nearest() -> None:
    weight = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    grid = FITS["symmetric"](weight, None)
    codes = gptq_codes(weight, grid, curvature(np.diag(np.arange(1.0, 65))))
    np.testing.assert_array_equal(codes, grid.nearest(weight))


def test_gptq_bears_inputs_that_are_always_zero_and_too_few_tokens() -> None:
    x = correlated(7, 64, 4)
    x[:, 5] = 0
    weight = np.random.default_rng(5).standard_normal((9, 64)).astype(np.float32)
    grid = FITS["affine"](weight, importance(hessian(x)))
    codes = gptq_codes(weight, grid, curvature(hessian(x)))
    assert codes.max() <= grid.levels
    held = grid.weight(codes).dequantize()
    assert output_error(x, weight, held) < output_error(
        x, weight, grid.weight(grid.nearest(weight)).dequantize()
    )


def test_awq_scales_lower_the_error_of_salient_inputs() -> None:
    random = np.random.default_rng(6)
    x = random.standard_normal((500, 128)).astype(np.float32)
    x[:, [3, 40, 77]] *= 30
    weight = random.standard_normal((64, 128)).astype(np.float32)
    inputs = hessian(x) / len(x)
    fit = FITS["zero point"]
    scale = find_scale([(weight, fit)], inputs.astype(np.float32), np.abs(x).mean(axis=0))
    grid = fit(weight * scale, importance(inputs / np.outer(scale, scale)))
    scaled = grid.weight(grid.nearest(weight * scale)).dequantize() / scale
    plain = fit(weight, None)
    rounded = plain.weight(plain.nearest(weight)).dequantize()
    assert output_error(x, weight, scaled) < 0.5 * output_error(x, weight, rounded)
    assert scale[3] > np.median(scale)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA, {}),
        (LLAMA, {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
        (GEMMA3, {}),
    ],
    ids=["grouped heads", "biases", "gemma"],
)
def test_scales_leave_the_model_what_it_is(
    write_model: WriteModel,
    logits: Logits,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    random = np.random.default_rng(9)
    with open_checkpoint(write_model(config, **changes)) as checkpoint:
        source = ModelSource(checkpoint, gguf=False)
        scaling = Scaling(source)
        taken = []
        for layer in range(2):
            for modules in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
                keys = [f"layers.{layer}.{module}.weight" for module in modules]
                if scaling.takes(keys):
                    taken.append(modules)
                    width = source.shapes[keys[0]][1]
                    scaling.add(keys, np.exp(random.standard_normal(width)).astype(np.float32))
        assert (("o",) in taken) == (changes.get("num_key_value_heads") == 4)
        assert ("down",) in taken
        expected = logits(checkpoint)
        scaled = {
            name: Dense(array=scaling.applied(unit, source.values(unit)))
            for name, unit in source.units.items()
        }
        name = "model.layers.0.mlp.up_proj.weight"
        assert not np.allclose(scaled[name].array, source.values(source.units[name]))
        monkeypatch.setattr(checkpoint, "weight", scaled.__getitem__)
        found = logits(checkpoint)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_families_with_other_modules_are_not_scaled(write_model: WriteModel) -> None:
    with open_checkpoint(write_model(LLAMA)) as checkpoint:
        source = ModelSource(checkpoint, gguf=False)
        source.shapes = {**source.shapes, "layers.0.other.weight": (4, 64)}
        scaling = Scaling(source)
    assert not scaling.known
    assert not scaling.takes(["layers.0.down.weight"])
