"""What cannot be loaded: one clear error each, and nothing is left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import polysilicon.engine.loading
from polysilicon.backend import DeviceInfo, DeviceLost, OutOfMemory
from polysilicon.config import Config
from polysilicon.engine.loading import build_engine, load, open_device
from polysilicon.errors import ConfigError, ModelError, PluginError, PolysiliconError
from polysilicon.models.loading import load_model
from polysilicon.plan.kv import plan_pages
from polysilicon.reference.device import ReferenceDevice
from polysilicon.reference.plugin import ReferenceBackend
from polysilicon.selection import Selection
from polysilicon.testing.tiny_models import tiny_llama
from polysilicon.weights.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(OutOfMemory, ModelError), (MemoryError, ModelError), (DeviceLost, PluginError)],
)
def test_weights_that_the_device_cannot_take(
    failure: type[Exception],
    kind: type[PolysiliconError],
    smollm2_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []

    def put(self: ReferenceDevice, *arguments: object) -> None:
        raise failure("93 MB of weights")

    monkeypatch.setattr(ReferenceDevice, "put", put)
    monkeypatch.setattr(ReferenceDevice, "close", lambda device: closed.append(device))
    with pytest.raises(kind, match="93 MB of weights"):
        load(Config(backend="reference"), smollm2_path)
    assert len(closed) == 1


class OddBackend:
    name = "odd"
    contract = (1, 0)
    priority = 0

    def __init__(self, opened: Any) -> None:
        self.opened = opened

    def probe(self) -> list[DeviceInfo]:
        return [DeviceInfo(name="card", memory=1)]

    def open(self, index: int, options: Mapping[str, str]) -> Any:
        if isinstance(self.opened, Exception):
            raise self.opened
        return self.opened


@pytest.mark.parametrize(
    ("opened", "kind", "message"),
    [
        (RuntimeError("no hardware"), PluginError, "RuntimeError: no hardware"),
        (OutOfMemory("full"), PluginError, "OutOfMemory: full"),
        (ValueError("unknown option"), ConfigError, "unknown option"),
        (None, PluginError, "NoneType, which is not a Device"),
        (object(), PluginError, "object, which is not a Device"),
    ],
)
def test_a_backend_that_opens_no_device(
    opened: Any, kind: type[PolysiliconError], message: str
) -> None:
    backend = OddBackend(opened)
    chosen = Selection(backend=backend, devices=tuple(backend.probe()))
    with pytest.raises(kind, match=message):
        open_device(Config(backend="odd"), chosen)


def test_activations_reach_the_backend_and_only_one_that_has_them() -> None:
    given = []

    class Choosing(OddBackend):
        def open(self, index: int, options: Mapping[str, str]) -> ReferenceDevice:
            given.append(options)
            return ReferenceDevice()

    backend = Choosing(None)
    chosen = Selection(backend=backend, devices=tuple(backend.probe()))
    open_device(Config(activations="bf16"), chosen).close()
    open_device(Config(), chosen).close()
    assert given == [{"activations": "bf16"}, {}]
    with pytest.raises(ConfigError, match="unknown option 'activations'"):
        open_device(Config(activations="bf16"), replace(chosen, backend=ReferenceBackend()))


@pytest.mark.parametrize("pages", [10**9, 10**12, 10**40])
def test_more_pages_than_memory(pages: int, tmp_path: Path) -> None:
    tiny_llama().write(tmp_path)
    device = ReferenceDevice()
    with open_checkpoint(tmp_path) as checkpoint:
        model = load_model(checkpoint, device)
    with pytest.raises(ConfigError, match="--kv-pages"):
        build_engine(Config(kv_pages=pages), device, model, identity="tiny", eos_ids=frozenset())


def test_page_tables_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(**arguments: object) -> None:
        raise MemoryError("59 GiB")

    monkeypatch.setattr(polysilicon.engine.loading, "KVManager", no_memory)
    tiny_llama().write(tmp_path)
    device = ReferenceDevice()
    with open_checkpoint(tmp_path) as checkpoint:
        model = load_model(checkpoint, device)
    with pytest.raises(ConfigError, match=r"59 GiB; lower .*--max-sequences"):
        build_engine(Config(), device, model, identity="tiny", eos_ids=frozenset())


def test_slots_stay_within_int32(tmp_path: Path) -> None:
    """However much memory there is: a slot is `page * page_size + offset`."""
    tiny_llama().write(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        specs = load_model(checkpoint, ReferenceDevice()).kv_specs(16, "f16")
    pages = plan_pages(
        specs, budget=1 << 60, max_sequences=1 << 16, max_length=(1 << 31) - 1, step_tokens=512
    )
    assert all(count > 1 << 26 and count * 16 < 1 << 31 for count in pages)
