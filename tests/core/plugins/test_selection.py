"""Probing, and the choice of a backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polysilicon.backend import DeviceInfo
from polysilicon.errors import PluginError
from polysilicon.plugins import load_plugins
from polysilicon.selection import (
    BackendStatus,
    capabilities,
    in_order,
    probe_all,
    select_backend,
)

Install = Callable[..., str]


def backends(*expressions: str) -> str:
    return f"@hookimpl\ndef polysilicon_backends(): return [{', '.join(expressions)}]"


PROBES = """
class Broken(Fake):
    def probe(self): raise OSError("driver 3 is too old")
class Exiting(Fake):
    def probe(self): raise SystemExit
class Rubbish(Fake):
    def probe(self): return ["gpu"]
class Nothing(Fake):
    def probe(self): return None
class Away(Fake):
    def probe(self): return Unavailable(reason="mlx is not installed: pip install mlx")
"""


def test_the_order_of_auto(install: Install) -> None:
    names = ["cpu", "rocm", "zinc", "metal", "opal", "cuda"]
    install("all", backends(*(f"Fake({n!r})" for n in names), "Fake('mica', priority=5)"))
    order = [backend.name for backend in in_order(load_plugins().backends)]
    assert order == ["cuda", "rocm", "metal", "mica", "opal", "zinc", "cpu", "reference"]


def test_auto_takes_the_first_that_can_run_and_names_those_before_it(install: Install) -> None:
    install("a", PROBES + backends("Away('metal')", "Broken('opal')", "Fake('cpu')"))
    selection = select_backend(load_plugins())
    assert selection.name == "cpu"
    assert selection.devices == (DeviceInfo(name="one", memory=1 << 30),)
    assert selection.passed_over == ("metal", "opal")
    assert select_backend(load_plugins(), "cpu").passed_over == ()


def test_auto_passes_over_what_stands_in_for_hardware(install: Install) -> None:
    probe = "DeviceInfo(name='emulator', memory=1 << 30, stand_in=True)"
    install(
        "a",
        "from polysilicon.backend import DeviceInfo\nclass Emulated(Fake):\n"
        f"    def probe(self): return [{probe}]\n" + backends("Emulated('metal')", "Fake('cpu')"),
    )
    selection = select_backend(load_plugins())
    assert (selection.name, selection.passed_over) == ("cpu", ("metal",))
    assert select_backend(load_plugins(), "metal").name == "metal"
    reports = {report.name: report for report in probe_all(load_plugins())}
    assert reports["metal"].status is BackendStatus.AVAILABLE
    assert reports["metal"].reason.startswith("computes on the processor")
    assert reports["cpu"].reason == ""


def test_auto_falls_back_on_the_reference(install: Install) -> None:
    install("a", PROBES + backends("Away('cpu')"))
    assert select_backend(load_plugins()).name == "reference"


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("Broken", BackendStatus.FAULTY, "its probe failed: OSError: driver 3 is too old"),
        ("Exiting", BackendStatus.FAULTY, "its probe failed: SystemExit"),
        ("Rubbish", BackendStatus.FAULTY, "its probe returned ['gpu'], not a list of DeviceInfo"),
        ("Nothing", BackendStatus.FAULTY, "its probe returned None, not a list of DeviceInfo"),
        ("Away", BackendStatus.UNAVAILABLE, "mlx is not installed: pip install mlx"),
    ],
)
def test_a_backend_that_cannot_run(
    install: Install, kind: str, status: BackendStatus, reason: str
) -> None:
    install("a", PROBES + backends(f"{kind}('opal')"))
    plugins = load_plugins()
    report = next(r for r in probe_all(plugins) if r.name == "opal")
    assert (report.status, report.reason, report.devices) == (status, reason, ())
    with pytest.raises(PluginError, match="backend 'opal' cannot run here: ") as error:
        select_backend(plugins, "opal")
    assert reason in str(error.value)
    assert select_backend(plugins, "reference").name == "reference"


def test_no_device(install: Install) -> None:
    install("a", backends("Fake('opal', devices=())"))
    report = next(r for r in probe_all(load_plugins()) if r.name == "opal")
    assert (report.status, report.reason) == (BackendStatus.UNAVAILABLE, "it found no device")


def test_a_broken_plugin_that_is_asked_for(install: Install) -> None:
    install("opal", "import no_such_vendor")
    with pytest.raises(PluginError, match=r"'opal' \(fake-opal 1.0\) is failed: .*no_such_vendor"):
        select_backend(load_plugins(), "opal")


def test_an_outdated_plugin_that_is_asked_for(install: Install) -> None:
    install("opal", backends("Fake('opal', contract=(9, 0))"))
    with pytest.raises(PluginError, match=r"is incompatible: .*upgrade polysilicon"):
        select_backend(load_plugins(), "opal")


def test_a_blocked_plugin_that_is_asked_for(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("opal", backends("Fake('opal')"))
    monkeypatch.setenv("POLYSILICON_PLUGINS", "-opal")
    with pytest.raises(PluginError, match=r"is blocked: .*take -opal out of it"):
        select_backend(load_plugins(), "opal")


def test_an_unknown_backend(install: Install) -> None:
    with pytest.raises(PluginError, match=r"did you mean 'reference'.*Installed: reference"):
        select_backend(load_plugins(), "referense")


def test_an_extra_that_is_not_installed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polysilicon.selection._extras", lambda: ["metal"])
    with pytest.raises(PluginError, match=r"pip install 'polysilicon\[metal\]'"):
        select_backend(load_plugins(), "metal")


def test_nothing_that_can_run(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("a", PROBES + backends("Away('cpu')"))
    monkeypatch.setenv("POLYSILICON_PLUGINS", "a,-reference")
    with pytest.raises(PluginError, match=r"no backend can run here.*mlx is not.*blocked by"):
        select_backend(load_plugins())


def test_no_plugin_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda: [])
    with pytest.raises(PluginError, match="pip install -e"):
        select_backend(load_plugins())


def test_capabilities_of_the_reference(install: Install) -> None:
    report = next(r for r in probe_all(load_plugins()) if r.name == "reference")
    assert "f16" in capabilities(report).kv_dtypes


def test_a_device_that_cannot_be_opened(install: Install) -> None:
    install("a", backends("Fake('opal')"))
    report = next(r for r in probe_all(load_plugins()) if r.name == "opal")
    with pytest.raises(PluginError, match="cannot open its first device: RuntimeError"):
        capabilities(report)
