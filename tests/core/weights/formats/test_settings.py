"""Where a checkpoint may say how it is quantised, and tensors that stand in several files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.formats.settings import stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

from . import gptq_cases, torchao_cases
from .checkpoints import Case, Written

Make = Callable[[Case], Written]
MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    ("config", "sidecars", "method", "bits"),
    [
        ({}, {}, None, None),
        ({"quantization_config": None}, {}, None, None),
        ({"quantization_config": {"quant_method": "GPTQ", "bits": 3}}, {}, "gptq", 3),
        ({"compression_config": {"quant_method": "compressed"}}, {}, "compressed", None),
        ({"quantization": MLX, "quantization_config": MLX}, {}, "mlx", 4),
        ({"text_config": {"quantization": MLX}}, {}, "mlx", 4),
        ({"text_config": [1], "quantization_config": {"bits": 2}}, {}, "", 2),
        ({"quantization_config": ["gptq"]}, {}, "", None),
        ({}, {"quantize_config.json": {"bits": 8}}, "gptq", 8),
        ({}, {"quant_config.json": {"bits": 4}}, "awq", 4),
        ({}, {"hf_quant_config.json": {"bits": 4}}, "", 4),
        ({"quantization": MLX}, {"quantize_config.json": {"bits": 8}}, "mlx", 4),
    ],
)  # fmt: skip
def test_what_is_said_first_counts(
    tmp_path: Path, config: Any, sidecars: Any, method: str | None, bits: int | None
) -> None:
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    for name, content in {"config.json": config, **sidecars}.items():
        (tmp_path / name).write_text(json.dumps(content))
    with SafetensorsDirectory(tmp_path) as files:
        settings = stated_settings(files)
    if method is None:
        assert settings is None
        return
    assert settings is not None
    assert settings.method == method
    assert settings.fields.has("bits") == (bits is not None)
    assert settings.fields.integer("bits", default=0, low=0) == (bits or 0)


@pytest.mark.parametrize("case", [gptq_cases.CASES[1], torchao_cases.CASES[1]], ids=str)
def test_parts_of_a_tensor_may_stand_in_several_files(made: Make, case: Case) -> None:
    """A shard has the metadata of its own tensors, and an index says which has what."""
    written = made(case)
    whole = written.folder / "model.safetensors"
    whole.unlink()
    places = {}
    for shard in range(3):
        name = f"model-{shard}.safetensors"
        tensors = {key: a for i, (key, a) in enumerate(written.stored.items()) if i % 3 == shard}
        entries = list(written.metadata.items())[shard::3]
        save_file(tensors, written.folder / name, metadata=dict(entries) or None)
        places |= dict.fromkeys(tensors, name)
    index = written.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with open_checkpoint(written.folder) as checkpoint:
        for name, values in written.twin.tensors.items():
            np.testing.assert_array_equal(checkpoint.weight(name).dequantize(), values)
