"""How the engine shares out memory, and what it says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polysilicon.backend import KVSpec
from polysilicon.config import Config
from polysilicon.engine.loading import Loaded, load
from polysilicon.engine.memory import KV_SHARE, LEAST_KV_SHARE, MemoryShares, share_memory
from polysilicon.engine.model_executor import ModelExecutor
from polysilicon.errors import ConfigError
from polysilicon.models.loading import load_model
from polysilicon.models.model import Model
from polysilicon.plan.bill import adapter_bytes, kv_bytes, workspace_bytes
from polysilicon.reference.device import ReferenceDevice
from polysilicon.testing.tiny_models import tiny_gemma
from polysilicon.testing.tiny_text import write_text_side
from polysilicon.weights.checkpoint import open_checkpoint

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    """Layers with a window and without, 512 tokens of context."""
    tiny_gemma().write(tmp_path)
    device = ReferenceDevice()
    with open_checkpoint(tmp_path) as checkpoint:
        yield load_model(checkpoint, device)
    device.close()


def shared(
    model: Model, config: Config, *, free: int, adapters: int = 0, rank: int = 16
) -> MemoryShares:
    specs = model.kv_specs(16, "f16")
    return share_memory(
        config, model, specs, free=free, max_adapters=adapters, max_adapter_rank=rank
    )


def test_enough_for_every_sequence(model: Model) -> None:
    """What is not asked for is no more than all sequences need, whatever is free."""
    config = Config(max_sequences=7, step_tokens=40)
    found = shared(model, config, free=GIB)
    assert found.bill.kv == kv_bytes(
        model.kv_specs(16, "f16"), concurrency=7, context=512, step_tokens=40
    )
    assert found.bill.weights == model.nbytes
    assert found.bill.workspace == workspace_bytes(model.config, step_tokens=40, max_sequences=7)
    (note,) = found.notes
    assert note.startswith("memory: weights ")
    assert all(f"KV {spec.name} " in note for spec in model.kv_specs(16, "f16"))
    assert "workspace about" in note
    assert note.endswith(" are free beside weights and KV")


def test_a_share_of_what_is_free(model: Model) -> None:
    workspace = workspace_bytes(model.config, step_tokens=512, max_sequences=1 << 16)
    for free, budget in (
        (10 * workspace, KV_SHARE * 10 * workspace),
        (int(1.2 * workspace), 0.2 * workspace),
        (workspace, LEAST_KV_SHARE * workspace),
    ):
        found = shared(model, Config(max_sequences=1 << 16), free=free)
        page = max(spec.page_bytes for spec in model.kv_specs(16, "f16"))
        assert budget - 3 * page < found.bill.kv_total <= budget


def test_more_than_is_needed_is_said(model: Model) -> None:
    config = Config(max_sequences=2, kv_memory=100 * GIB)
    found = shared(model, config, free=GIB)
    assert found.bill.kv_total < GIB
    assert (
        "of --kv-memory 100.0 GiB: --max-sequences 2 of 512 tokens need no more"
        in (found.notes[-1])
    )
    exact = Config(max_sequences=2, kv_memory=found.bill.kv_total)
    assert shared(model, exact, free=GIB).pages == found.pages
    assert len(shared(model, exact, free=GIB).notes) == 1


@pytest.mark.parametrize("config", [{"kv_memory": 300 << 20}, {"kv_pages": 1 << 20}])
def test_more_than_is_free_is_refused(config: dict[str, int], model: Model) -> None:
    """The number that the error names works."""
    wanted = Config(max_sequences=1 << 16, **config)  # type: ignore[arg-type]
    workspace = workspace_bytes(model.config, step_tokens=512, max_sequences=1 << 16)
    free = workspace + (200 << 20)
    with pytest.raises(ConfigError, match=r"--kv-memory at 200\.0 MiB or less") as raised:
        shared(model, wanted, free=free)
    assert "that are free" in str(raised.value)
    mended = Config(max_sequences=1 << 16, kv_memory=200 << 20)
    assert shared(model, mended, free=free).bill.kv_total <= 200 << 20
    with pytest.raises(ConfigError, match="free some memory"):
        shared(model, wanted, free=workspace // 2)


def test_pages_of_any_number(model: Model) -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        shared(model, Config(kv_pages=10**400), free=GIB)


def test_nothing_free(model: Model) -> None:
    with pytest.raises(ConfigError, match="not even one page"):
        shared(model, Config(), free=0)


def test_adapters_are_left_room_for(model: Model) -> None:
    linears = [
        (target.inputs, outputs)
        for target in model.adapter_targets().values()
        for outputs in target.outputs
    ]
    found = shared(model, Config(), free=GIB, adapters=4, rank=8)
    assert found.bill.adapters == adapter_bytes(linears, adapters=4, rank=8) > 0
    assert "adapters" in found.notes[0]
    huge = Config(max_sequences=1 << 16, kv_memory=GIB // 2)
    with pytest.raises(ConfigError, match=r"and adapters .* MiB"):
        shared(model, huge, free=GIB // 2, adapters=64, rank=64)


def test_the_bill_is_among_the_notes(tmp_path: Path) -> None:
    tiny_gemma().write(tmp_path)
    write_text_side(tmp_path)
    loaded = load(Config(backend="reference", max_sequences=3, kv_dtype="f16"), tmp_path)
    try:
        (note,) = [note for note in loaded.notes if note.startswith("memory: weights ")]
        assert loaded.memory["weights"] > 0
        # Page 0 and three whole sequences: of both groups the pools that the device has.
        assert loaded.memory["kv"] == sum(
            kv_bytes(model_specs(loaded), concurrency=3, context=512, step_tokens=512).values()
        )
        assert all(f"KV {spec.name} " in note for spec in model_specs(loaded))
    finally:
        loaded.client.close()
        loaded.checkpoint.close()


def model_specs(loaded: Loaded) -> tuple[KVSpec, ...]:
    executor = loaded.engine.executor
    assert isinstance(executor, ModelExecutor)
    return executor.model.kv_specs(16, "f16")
