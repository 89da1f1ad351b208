"""A minimal engine for tests of model definitions: one sequence, prefilled in given chunks."""

from __future__ import annotations

import functools
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from polysilicon.backend import AdapterPool, Batch, Device, KVPool, Outputs
from polysilicon.models.model import Model
from polysilicon.reference.device import ReferenceDevice

from .gguf_twins import write_twin

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
        without: Sequence[str] = (),
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


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Write a tiny model as llama.cpp's converter would, and return the file's path.

    changes: metadata to set besides or instead, without the architecture's prefix; tensors: added.
    without: words in the names of tensors that are left out.
    """

    def write(
        model: TinyModel,
        changes: Mapping[str, Any] | None = None,
        tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
        without: Sequence[str] = (),
    ) -> Path:
        path = tmp_path / f"{model.name}.gguf"
        write_twin(
            path,
            model.legacy,
            model.weights,
            changes=changes or {},
            added=tensors or {},
            without=without,
        )
        return path

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
