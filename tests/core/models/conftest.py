"""A minimal engine for tests of model definitions: one sequence, prefilled in given chunks."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from polysilicon.backend import AdapterPool, Batch, Device, KVPool, Outputs
from polysilicon.models.model import Model
from polysilicon.reference.device import ReferenceDevice

FOLDER = Path(__file__).parents[2] / "fixtures" / "models"


class Logits(Protocol):
    def __call__(
        self,
        model: Model,
        tokens: Sequence[int],
        *,
        chunks: Sequence[int] | None = None,
        page_size: int = 16,
        adapters: AdapterPool | None = None,
        adapter_slot: int = 0,
    ) -> npt.NDArray[np.float32]: ...


ComputeOutputs = Callable[[Model, Sequence[int], Sequence[int]], Outputs]


@pytest.fixture
def device() -> Iterator[Device]:
    opened = ReferenceDevice()
    yield opened
    opened.close()


@pytest.fixture
def logits(device: Device) -> Logits:
    """Logits `[len(tokens), V]` of every position, from a prefill in `chunks` (default: one)."""

    def compute(
        model: Model,
        tokens: Sequence[int],
        *,
        chunks: Sequence[int] | None = None,
        page_size: int = 16,
        adapters: AdapterPool | None = None,
        adapter_slot: int = 0,
    ) -> npt.NDArray[np.float32]:
        pools = bound_pools(device, model, len(tokens), page_size, adapters)
        program = device.compile(model.forward)
        results = []
        start = 0
        for size in chunks or [len(tokens)]:
            batch = chunk_batch(tokens, start, size, page_size, len(pools), adapter_slot)
            results.append(program(batch, None).result().logits)
            start += size
        assert start == len(tokens)
        for pool in pools:
            pool.close()
        return np.concatenate(results)

    return compute


@pytest.fixture
def outputs(device: Device) -> ComputeOutputs:
    """Logits of every position, and hidden states of the layers named."""

    def compute(model: Model, tokens: Sequence[int], layers: Sequence[int]) -> Outputs:
        pools = bound_pools(device, model, len(tokens), 16, None)
        program = device.compile(model.forward, hidden=layers)
        batch = chunk_batch(tokens, 0, len(tokens), 16, len(pools))
        return program(batch, None).result()

    return compute


def bound_pools(
    device: Device, model: Model, length: int, page_size: int, adapters: AdapterPool | None
) -> list[KVPool]:
    """Float32 pools for one sequence of `length` tokens, and page 0, bound to the model."""
    pages = 1 - (-length // page_size)
    pools = [device.kv_pool(spec, pages) for spec in model.kv_specs(page_size, "f32")]
    model.bind(pools, adapters)
    return pools


def chunk_batch(
    tokens: Sequence[int],
    start: int,
    size: int,
    page_size: int,
    groups: int,
    adapter_slot: int = 0,
) -> Batch:
    """The step for `tokens[start:start + size]` of one sequence, with all their logits."""
    end = start + size
    positions = np.arange(start, end, dtype=np.int32)
    pages = -(-end // page_size)
    # Reversed, so that a page table that is not followed shows.
    last = -(-len(tokens) // page_size)
    table = np.arange(last, last - pages, -1, dtype=np.int32)[None]
    slots = table[0, positions // page_size] * page_size + positions % page_size
    return Batch(
        tokens=np.array(tokens[start:end], np.int32),
        token_source=np.full(size, -1, np.int32),
        positions=positions,
        query_start=np.array([0, size], np.int32),
        context_len=np.array([end], np.int32),
        page_tables=(table,) * groups,
        slots=(slots.astype(np.int32),) * groups,
        logit_rows=np.arange(size, dtype=np.int32),
        sequence_slot=np.zeros(1, np.int32),
        adapter_slot=np.array([adapter_slot], np.int32),
    )


class TinyModel:
    """A model of `ci/fixtures/make_tiny_models.py`, with what transformers computes for it."""

    def __init__(self, name: str) -> None:
        document = json.loads((FOLDER / f"{name}.json").read_text())
        self.name = name
        self.config: dict[str, Any] = document["config"]
        self.legacy: dict[str, Any] = document["legacy"]
        self.weights: dict[str, npt.NDArray[np.float32]] = generator().tiny_weights(
            document["tensors"]
        )
        self.tokens: list[int] = generator().tiny_prompt(document["length"], 97)
        with np.load(FOLDER / "logits.npz") as expected:
            self.expected: npt.NDArray[np.float32] = expected[name]


Array = npt.NDArray[Any]
Tiny = Callable[[str], TinyModel]
WriteSafetensors = Callable[[Mapping[str, Any], Mapping[str, Array]], Path]


class WriteGGUF(Protocol):
    def __call__(
        self,
        model: TinyModel,
        changes: Mapping[str, Any] | None = None,
        tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> Path: ...


@pytest.fixture
def tiny() -> Tiny:
    return TinyModel


@pytest.fixture
def write_safetensors(tmp_path: Path) -> WriteSafetensors:
    """Write a directory as Hugging Face does, with one file of weights, and return its path."""

    def write(config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[Any]]) -> Path:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / "config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(dict(weights), folder / "model.safetensors")
        return folder

    return write


@functools.cache
def generator() -> ModuleType:
    """The script that made the fixtures, for the weights and prompts that it does not store."""
    path = Path(__file__).parents[3] / "ci" / "fixtures" / "make_tiny_models.py"
    spec = importlib.util.spec_from_file_location("make_tiny_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Write a tiny model as llama.cpp's converter would, and return the file's path.

    changes: metadata to set besides or instead, without the architecture's prefix; tensors: added.
    """

    def write(
        model: TinyModel,
        changes: Mapping[str, Any] | None = None,
        tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> Path:
        path = tmp_path / f"{model.name}.gguf"
        config = model.legacy
        name = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
            config["model_type"], config["model_type"]
        )
        writer = gguf.GGUFWriter(path, name)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        writer.add_token_list([f"token{index}" for index in range(config["vocab_size"])])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        if config.get("head_dim"):
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        if config.get("sliding_window"):
            writer.add_sliding_window(config["sliding_window"])
        if config.get("sliding_window_pattern"):
            writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        if name == "gemma2":
            writer.add_attn_logit_softcapping(50.0)
        cap = config.get("final_logit_softcapping", 30.0 if name == "gemma2" else None)
        if cap:
            writer.add_final_logit_softcapping(cap)
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        _add_rope_scaling(writer, config, head_dim)
        kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
        names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
        for key, values in model.weights.items():
            if name == "llama" and ".q_proj." in key:
                values = interleaved(values, heads)
            if name == "llama" and ".k_proj." in key:
                values = interleaved(values, kv_heads)
            if name.startswith("gemma") and key.endswith("norm.weight"):
                values = values + 1
            writer.add_tensor(names.get_name(key, (".weight", ".bias")), values)
        for key, values in (tensors or {}).items():
            writer.add_tensor(key, values)
        for key, value in (changes or {}).items():
            key = key if key.startswith("general.") else f"{name}.{key}"
            for fields in writer.kv_data:
                fields.pop(key, None)
            _add_value(writer, key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_key_value(
            key, value, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT32
        )
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType.INT64)


def interleaved(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k as llama.cpp wants them: rotary pairs beside each other."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape).copy()


def _add_rope_scaling(writer: gguf.GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    scaling = config.get("rope_scaling", {})
    kind = scaling.get("rope_type", scaling.get("type"))
    original = scaling.get("original_max_position_embeddings")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(original)
    elif kind == "longrope":
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        for which in ("long", "short"):
            factors = np.array(scaling[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    elif kind == "llama3":
        factors = []
        for index in range(0, head_dim, 2):
            wavelength = 2 * math.pi * config["rope_theta"] ** (index / head_dim)
            smooth = (original / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            if wavelength < original / scaling["high_freq_factor"]:
                factors.append(1.0)
            elif wavelength > original / scaling["low_freq_factor"]:
                factors.append(scaling["factor"])
            else:
                factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
