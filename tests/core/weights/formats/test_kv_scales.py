"""Calibrated scales of fp8 KV, under every name that they have in checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polysilicon.backend import Device, KVScales
from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.errors import ModelError
from polysilicon.models.kv_scales import read_kv_scales
from polysilicon.models.loading import load_model
from polysilicon.reference.device import ReferenceDevice
from polysilicon.reference.pools import ReferenceKVPool
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.tiny_text import write_text_side
from polysilicon.weights.checkpoint import open_checkpoint

from . import fp8_cases, modelopt_cases
from .answers import TOKENS
from .checkpoints import Array, Case, Written

Make = Callable[[Case], Written]
Layers = list[tuple[tuple[float, float], tuple[float, float]] | None]

FP8 = {"type": "float", "num_bits": 8, "dynamic": False, "symmetric": True}
DENSE = Case(name="dense", config={}, quantize=lambda *_: None, type="F32")
WITH_FP8 = next(case for case in fp8_cases.CASES if case.name == "fp8-static")
WITH_NVFP4 = next(case for case in modelopt_cases.CASES if case.name == "modelopt-nvfp4")


def compressed(**scheme: Any) -> dict[str, Any]:
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {**FP8, **scheme},
        }
    }


def attention(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


def scalar(value: float) -> Array:
    return np.array(value, np.float32)


def by_head(*values: float) -> Array:
    return np.array(values, ml_dtypes.bfloat16).reshape(-1, 1, 1)


def one(k: float, v: float) -> tuple[tuple[float, float], tuple[float, float]]:
    return (float(np.float32(k)),) * 2, (float(np.float32(v)),) * 2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Scales in a checkpoint: what stands in config.json, None for what the case has there, and in
    hf_quant_config.json; the tensors; and what each layer's scales come out as."""

    case: Case = DENSE
    config: Mapping[str, Any] | None = None
    sidecar: Mapping[str, Any] | None = None
    tensors: Mapping[str, Array]
    expected: Layers

    def write(self, made: Make) -> Path:
        written = made(self.case)
        written.rewrite(self.tensors, config=self.config)
        if self.sidecar is not None:
            (written.folder / "hf_quant_config.json").write_text(json.dumps(self.sidecar))
        return written.folder


LAYOUTS = {
    "one of each layer": Layout(
        config=compressed(strategy="tensor"),
        tensors={
            f"{attention(layer)}.{part}_scale": np.array([2.0**-power], ml_dtypes.bfloat16)
            for layer, part, power in ((0, "k", 3), (0, "v", 4), (1, "k", 5), (1, "v", 6))
        },
        expected=[one(2**-3, 2**-4), one(2**-5, 2**-6)],
    ),
    "one of each head, of one layer": Layout(
        config=compressed(strategy="attn_head"),
        tensors={
            f"{attention(1)}.k_scale": by_head(0.25, 0.5),
            f"{attention(1)}.v_scale": by_head(0.125, 2.0),
        },
        expected=[None, ((0.25, 0.5), (0.125, 2.0))],
    ),
    "ModelOpt, KV alone": Layout(
        sidecar={"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        tensors={
            f"{attention(layer)}.{part}_proj.{part}_scale": scalar(0.1 + layer)
            for layer in range(2)
            for part in "kv"
        },
        expected=[one(0.1, 0.1), one(1.1, 1.1)],
    ),
    "ModelOpt, weights too": Layout(
        case=WITH_NVFP4,
        tensors={
            f"{attention(0)}.k_proj.k_scale": scalar(0.3),
            f"{attention(0)}.v_proj.v_scale": scalar(0.4),
        },
        expected=[one(0.3, 0.4), None],
    ),
    "AutoFP8": Layout(
        case=WITH_FP8,
        tensors={f"{attention(layer)}.kv_scale": scalar(0.02) for layer in range(2)},
        expected=[one(0.02, 0.02)] * 2,
    ),
    "outputs": Layout(
        case=WITH_FP8,
        config=fp8_cases.config(kv_cache_scheme="static"),
        tensors={
            f"{attention(0)}.k_proj.output_scale": scalar(0.02),
            f"{attention(0)}.v_proj.output_scale": scalar(0.03),
        },
        expected=[one(0.02, 0.03), None],
    ),
    "int8": Layout(
        config=compressed(type="int"),
        tensors={f"{attention(0)}.{part}_scale": scalar(1) for part in "kv"},
        expected=[None, None],
    ),
    "dynamic": Layout(
        config=compressed(dynamic=True),
        tensors={f"{attention(0)}.{part}_scale": scalar(1) for part in "kv"},
        expected=[None, None],
    ),
    "asymmetric": Layout(
        config=compressed(symmetric=False),
        tensors={f"{attention(0)}.{part}_scale": scalar(1) for part in "kv"},
        expected=[None, None],
    ),
    "NVFP4": Layout(
        sidecar={"quantization": {"kv_cache_quant_algo": "NVFP4"}},
        tensors={f"{attention(0)}.{part}_proj.{part}_scale": scalar(1) for part in "kv"},
        expected=[None, None],
    ),
    "nothing said": Layout(
        tensors={f"{attention(0)}.{part}_scale": scalar(1) for part in "kv"},
        expected=[None, None],
    ),
}


def stored_scales(folder: Path, device: Device) -> list[dict[str, Array]]:
    """By layer, the planes of scales `[T, heads]` after a prefill of `TOKENS` with fp8 KV."""
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, device, kv_dtype="fp8_e4m3")
    [spec] = model.kv_specs(128, "fp8_e4m3")
    pool = device.kv_pool(spec, 2)
    assert isinstance(pool, ReferenceKVPool)
    model.bind([pool])
    batch = make_batch([Chunk(tokens=TOKENS, pages=[[1]])], [128])
    assert np.isfinite(device.compile(model.forward)(batch, None).result().logits).all()
    return [
        {part: pool.plane(f"{part}_scale", layer)[batch.slots[0], :, 0] for part in "kv"}
        for layer in range(2)
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(made: Make, reference: Device, name: str) -> None:
    """What KV is stored with: the checkpoint's scales, or each token's own."""
    layout = LAYOUTS[name]
    for planes, expected in zip(
        stored_scales(layout.write(made), reference), layout.expected, strict=True
    ):
        for part, place in (("k", 0), ("v", 1)):
            if expected is None:
                assert len(np.unique(planes[part])) > len(TOKENS)
            else:
                constants = np.array(expected[place], np.float32)
                assert (planes[part] == constants).all()


def test_fused_projections(made: Make) -> None:
    tensors = {f"{attention(0)}.qkv_proj.{part}_scale": scalar(0.5) for part in "kv"}
    folder = Layout(config=compressed(), tensors=tensors, expected=[]).write(made)
    module = f"{attention(0)}.qkv_proj"
    with open_checkpoint(folder) as checkpoint:
        found = read_kv_scales(checkpoint, module, module, heads=3)
    assert found == KVScales(k=(0.5,) * 3, v=(0.5,) * 3)


KEY = f"{attention(1)}.k_scale"
BROKEN: dict[str, tuple[Array | None, str]] = {
    "zero": (scalar(0), "is not a positive number"),
    "negative": (scalar(-1), "is not a positive number"),
    "not a number": (scalar(np.nan), "is not a positive number"),
    "infinite": (scalar(np.inf), "is not a positive number"),
    "subnormal": (scalar(1e-39), "is not a positive number"),
    "one head's": (by_head(0.5, -0.5), "is not a positive number"),
    "too many": (np.ones(3, np.float32), r"has shape \[3\], expected one scale"),
    "none": (np.ones(0, np.float32), r"has shape \[0\], expected one scale"),
    "of queries": (np.ones((4, 1, 1), np.float32), r"has shape \[4, 1, 1\], expected one scale"),
    "a matrix": (np.ones((2, 2), np.float32), r"has shape \[2, 2\], expected one scale"),
    "integers": (np.ones(1, np.int32), "I32"),
    "missing": (None, "lacks tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_scales_that_cannot_be_used(made: Make, reference: Device, name: str) -> None:
    """One error that names the tensor; none where KV is of another dtype."""
    value, problem = BROKEN[name]
    tensors = {f"{attention(1)}.v_scale": scalar(0.5)} | ({} if value is None else {KEY: value})
    folder = Layout(config=compressed(), tensors=tensors, expected=[]).write(made)
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(ModelError, match=problem) as caught:
            load_model(checkpoint, reference, kv_dtype="fp8_e4m3")
        assert KEY in str(caught.value)
        for kv_dtype in ("f16", "int8", None):
            load_model(checkpoint, reference, kv_dtype=kv_dtype)


@pytest.mark.parametrize("scheme", [{"type": 8}, {"num_bits": "8"}, {"dynamic": "no"}])
def test_malformed_schemes(made: Make, reference: Device, scheme: dict[str, Any]) -> None:
    tensors = {f"{attention(0)}.{part}_scale": scalar(1) for part in "kv"}
    folder = Layout(config=compressed(**scheme), tensors=tensors, expected=[]).write(made)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(ModelError, match=f"kv_cache_scheme.* has {next(iter(scheme))} = "),
    ):
        load_model(checkpoint, reference, kv_dtype="fp8_e4m3")


def test_a_device_of_the_first_contract(made: Make) -> None:
    """It knows no such keyword, and is not given it; the user is told."""
    device = ReferenceDevice()
    device.capabilities = dataclasses.replace(device.capabilities, kv_scales=False)
    attend = device.ops.attention

    def attention_of_then(*arguments: Any, **named: Any) -> Any:
        assert "kv_scales" not in named
        return attend(*arguments, **named)

    device.ops.attention = attention_of_then  # type: ignore[method-assign]
    layout = LAYOUTS["one of each layer"]
    folder = layout.write(made)
    for planes in stored_scales(folder, device):
        assert len(np.unique(planes["k"])) > len(TOKENS)
    with open_checkpoint(folder) as checkpoint:
        notes = load_model(checkpoint, device, kv_dtype="fp8_e4m3").notes
    assert any("its own scales" in note for note in notes)
    device.close()


@pytest.mark.parametrize(("kv_dtype", "told"), [("fp8_e4m3", True), ("f16", False)])
def test_the_engine_takes_them_with_its_kv_dtype(made: Make, kv_dtype: str, told: bool) -> None:
    layout = LAYOUTS["one of each layer"]
    config = Config(backend="reference", kv_dtype=kv_dtype, kv_pages=24, max_sequences=1)
    folder = layout.write(made)
    write_text_side(folder)
    loaded = load(config, folder)
    loaded.client.close()
    assert told == any("the scales that the checkpoint brings" in note for note in loaded.notes)
