"""`--quantize`: a dense checkpoint's matrices are rounded while they are loaded."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import Dense, GroupAffine, GroupFloat, Shard, Weight
from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.errors import ConfigError, ModelError
from polysilicon.models.loading import load_model
from polysilicon.models.quantizing import QUANTIZE_SCHEMES, quantize_loaded
from polysilicon.quantization.quantize import quantize
from polysilicon.quantization.source import ModelSource
from polysilicon.reference.device import ReferenceDevice
from polysilicon.weights.checkpoint import open_checkpoint

from .conftest import LLAMA, Logits, WriteModel


class Watching(ReferenceDevice):
    """Notes what is put, by encoding."""

    def __init__(self) -> None:
        super().__init__()
        self.put_parts: list[Weight] = []

    def put(self, parts: Any, shard: Shard | None = None) -> Any:
        self.put_parts += parts
        return super().put(parts, shard)


@pytest.mark.parametrize(
    ("scheme", "linears", "tables"),
    [
        ("w4", "affine:4/32", "affine:8/32"),
        ("w8", "affine:8/32", "affine:8/32"),
        ("fp8", "float:f8_e4m3/*", "dense:f32"),
    ],
)
def test_matrices_are_quantised_and_vectors_are_not(
    write_model: WriteModel, scheme: str, linears: str, tables: str
) -> None:
    device = Watching()
    with open_checkpoint(write_model(LLAMA)) as checkpoint:
        model = load_model(checkpoint, device, quantize=scheme)
    matrices = [part for part in device.put_parts if len(part.shape) == 2]
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for part in matrices:
        kinds[part.shape[0] == LLAMA["vocab_size"]].append(part.encoding)
    assert kinds[True] == [tables] * 2
    assert len(kinds[False]) == 14
    assert fnmatch.filter(kinds[False], linears) == kinds[False]
    assert all(isinstance(part, Dense) for part in device.put_parts if len(part.shape) == 1)
    assert any(f"--quantize {scheme}" in note for note in model.notes)
    device.close()


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_the_model_is_that_of_the_rounded_weights(
    write_model: WriteModel, logits: Logits, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with open_checkpoint(write_model(LLAMA)) as checkpoint:
        dense = logits(checkpoint)
        rounded = logits(checkpoint, quantize=scheme)
        source = ModelSource(checkpoint, gguf=False)
        held = {
            name: quantize_loaded(checkpoint.weight(name), unit.parts[0].key, scheme, "model")
            if unit.linear
            else checkpoint.weight(name)
            for name, unit in source.units.items()
        }
        monkeypatch.setattr(checkpoint, "weight", held.__getitem__)
        np.testing.assert_array_equal(logits(checkpoint), rounded)
    assert not np.array_equal(rounded, dense)


def test_inputs_that_the_group_does_not_divide_stay_dense(write_model: WriteModel) -> None:
    device = Watching()
    with open_checkpoint(write_model(LLAMA, intermediate_size=40)) as checkpoint:
        model = load_model(checkpoint, device, quantize="w4")
    down = [part for part in device.put_parts if part.shape == (64, 40)]
    assert [part.encoding for part in down] == ["dense:f32"] * 2
    assert "2 matrices stay dense:f32, as --quantize w4 leaves them." in model.notes
    device.close()


def test_stacks_of_experts_are_quantised_and_routers_are_not() -> None:
    values = np.random.default_rng(0).standard_normal((3, 8, 64)).astype(np.float32)
    for scheme in QUANTIZE_SCHEMES:
        held = quantize_loaded(Dense(array=values), "layers.0.gate.weight", scheme, "model")
        assert isinstance(held, GroupAffine | GroupFloat)
        for expert in range(3):
            alone = quantize_loaded(
                Dense(array=values[expert]), "layers.0.gate.weight", scheme, "model"
            )
            np.testing.assert_array_equal(held.dequantize()[expert], alone.dequantize())
    router = Dense(array=values[0])
    assert quantize_loaded(router, "layers.0.router.weight", "w4", "model") is router


def test_what_is_quantised_already_is_refused(write_model: WriteModel, tmp_path: Path) -> None:
    with open_checkpoint(write_model(LLAMA)) as checkpoint:
        quantize(checkpoint, tmp_path / "out", to="mlx")
    with (
        open_checkpoint(tmp_path / "out") as checkpoint,
        pytest.raises(ConfigError, match="Leave --quantize out, or name the unquantised model"),
    ):
        load_model(checkpoint, ReferenceDevice(), quantize="w8")


def test_the_refusal_says_the_types_as_the_file_does(smollm2_path: Path) -> None:
    """The type of most tensors first, whichever is read first."""
    with (
        open_checkpoint(smollm2_path) as checkpoint,
        pytest.raises(ConfigError, match=r"quantised already \(Q4_1, Q8_0\)"),
    ):
        load_model(checkpoint, ReferenceDevice(), quantize="w8")


def test_weights_that_are_no_numbers_are_refused() -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 3] = np.inf
    with pytest.raises(ModelError, match="infinities or NaN"):
        quantize_loaded(Dense(array=values), "layers.0.q.weight", "w4", "model")


def test_devices_that_do_not_run_it_get_it_transcoded(write_model: WriteModel) -> None:
    device = Watching()
    device.capabilities = dataclasses.replace(device.capabilities, encodings=("dense:*",))
    with open_checkpoint(write_model(LLAMA)) as checkpoint:
        model = load_model(checkpoint, device, quantize="fp8")
    assert all(isinstance(part, Dense) for part in device.put_parts)
    assert any("as the device does not run float:f8_e4m3/64" in note for note in model.notes)
    device.close()


def test_the_engine_keeps_the_kv_of_each_scheme_apart(write_model: WriteModel) -> None:
    folder = write_model(LLAMA)
    identities = set()
    for scheme in (None, *QUANTIZE_SCHEMES):
        config = Config(backend="reference", quantize=scheme, kv_pages=4)
        loaded = load(config, folder)
        identities.add(loaded.engine._model_identity)
        loaded.client.close()
        loaded.checkpoint.close()
    assert len(identities) == 4


def test_configurations_name_a_scheme() -> None:
    with pytest.raises(ValueError, match="w4"):
        Config.model_validate(json.loads('{"quantize": "w5"}'))
