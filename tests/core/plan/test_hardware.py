"""The table of accelerators, and the machine at hand."""

from __future__ import annotations

import itertools
import re

import pytest

from polysilicon.backend import DeviceLost, MemoryInfo
from polysilicon.config import Config
from polysilicon.errors import ConfigError, PluginError
from polysilicon.plan.hardware import RATE_DTYPES, find_hardware, hardware_table
from polysilicon.plan.measured import MeasuredHardware, this_machine
from polysilicon.plugins import load_plugins
from polysilicon.reference.device import ReferenceDevice


@pytest.mark.parametrize("key", hardware_table())
def test_every_figure_has_its_source(key: str) -> None:
    entry = find_hardware(key)
    figures = [entry.memory, entry.bandwidth(1), *entry.rates.values()]
    assert all(re.search(r"\b20[12]\d\b", figure.source) for figure in figures)
    assert set(entry.rates) <= set(RATE_DTYPES)
    assert entry.key == key
    # As many bytes a card has, as many tenths of a second reading them takes: units are not mixed.
    assert 8e9 <= entry.memory.value <= 1e12
    assert 0.01 < entry.memory.value / entry.bandwidth(1).value < 1
    assert all(1e13 < rate.value < 1e17 for rate in entry.rates.values())
    halves = [entry.rates[dtype].value for dtype in ("bf16", "fp8", "fp4") if dtype in entry.rates]
    assert all(1.9 < b / a < 4.1 for a, b in itertools.pairwise(halves))


def test_the_accelerators_that_are_asked_for_most() -> None:
    wanted = {"a100", "h100", "h200", "b200", "l40s", "mi300x", "mi355x", "m4-max"}
    assert wanted <= set(hardware_table())


@pytest.mark.parametrize("name", ["h10", "", "H100 ", "this machine", "x" * 500])
def test_an_unknown_name_names_the_known(name: str) -> None:
    with pytest.raises(ConfigError, match=r"Known are a100, .*m4-max, and this") as raised:
        find_hardware(name)
    assert len(str(raised.value)) < 500
    if name == "h10":
        assert "did you mean 'h100'?" in str(raised.value)


def test_this_machine_is_measured() -> None:
    with this_machine(Config(backend="reference"), load_plugins()) as machine:
        assert machine.memory.value > 1 << 28
        products = machine.product_rate("bf16")
        assert products is not None
        assert products[0] == "f32"
        assert products[1].value > 1e8
        small, large = machine.bandwidth(1), machine.bandwidth(20 << 20)
        assert small is not None
        assert large is not None
        assert min(small.value, large.value) > 1e8
        assert "20 MiB" in large.source
        assert machine.bandwidth((20 << 20) + 1) == large


def test_the_backend_that_is_named() -> None:
    with (
        pytest.raises(PluginError, match="not installed"),
        this_machine(Config(backend="no-such"), load_plugins()),
    ):
        pass


def test_a_backend_that_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceDevice, "ceilings", lambda self, nbytes: {})
    with pytest.raises(ConfigError, match="does not measure its devices: name yours"):
        MeasuredHardware(ReferenceDevice(), name="x", backend="reference")


@pytest.mark.parametrize(
    ("measured", "stored", "used"),
    [
        ({"f32": 1.0, "bf16": 2.0, "fp8": 4.0}, "fp8", "f32"),
        ({"bf16": 2.0, "fp8": 4.0}, "fp8", "fp8"),
        ({"bf16": 2.0, "fp8": 4.0}, "fp4", "bf16"),
        ({"int8": 2.0}, "fp8", None),
    ],
)
def test_what_a_device_computes_in_comes_first(
    measured: dict[str, float], stored: str, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it has no rate of that, what weights are stored in, as on an accelerator of the
    table. The reference device computes in float32."""
    monkeypatch.setattr(ReferenceDevice, "ceilings", lambda self, nbytes: measured)
    machine = MeasuredHardware(ReferenceDevice(), name="x", backend="reference")
    found = machine.product_rate(stored)
    assert (None if found is None else found[0]) == used


def test_a_device_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: ReferenceDevice, nbytes: int) -> dict[str, float]:
        raise DeviceLost("gone")

    monkeypatch.setattr(ReferenceDevice, "ceilings", lost)
    with (
        pytest.raises(PluginError, match="backend reference failed: gone"),
        this_machine(Config(backend="reference"), load_plugins()),
    ):
        pass


def test_little_memory_is_not_measured_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ceilings(self: ReferenceDevice, nbytes: int) -> dict[str, float]:
        asked.append(nbytes)
        return {"bandwidth": 1.0}

    little = MemoryInfo(total=64 << 20, free=32 << 20, used={})
    monkeypatch.setattr(ReferenceDevice, "ceilings", ceilings)
    monkeypatch.setattr(ReferenceDevice, "memory", lambda self: little)
    machine = MeasuredHardware(ReferenceDevice(), name="x", backend="reference")
    machine.bandwidth(1 << 40)
    assert max(asked) == 16 << 20


def test_sizes_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ceilings(self: ReferenceDevice, nbytes: int) -> dict[str, float]:
        asked.append(nbytes)
        return {"bandwidth": float(nbytes)}

    monkeypatch.setattr(ReferenceDevice, "ceilings", ceilings)
    machine = MeasuredHardware(ReferenceDevice(), name="x", backend="reference")
    assert machine.product_rate("bf16") is None
    asked.clear()
    for nbytes in (1, 1 << 20, 100 << 20, (100 << 20) + 5, 1 << 29, 1 << 45):
        found = machine.bandwidth(nbytes)
        assert found is not None
        clipped = min(max(nbytes, 1 << 20), 1 << 29)
        assert 0.85 * clipped < found.value <= clipped
    assert len(asked) == 3
