"""What the rocm backend says of an environment, and that it loads nothing before it is asked.

torch is played by modules of the tests': these run with and without the real one.
"""

import importlib.util
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from polysilicon.backend import Unavailable
from polysilicon.errors import PluginError
from polysilicon.plugins import load_plugins
from polysilicon.selection import select_backend
from polysilicon_rocm.plugin import ROCmBackend
from polysilicon_torch import presence

INSTALL = "install torch from the ROCm index that pytorch.org names"


def play_torch(monkeypatch, *, cuda=None, hip=None, cards=(), triton=True):
    """An environment whose torch is built for a version of CUDA or HIP and sees cards, each by name
    and architecture."""
    from polysilicon.errors import PolysiliconError

    torch = ModuleType("torch")
    torch.__version__ = "2.11.0"
    torch.version = SimpleNamespace(cuda=cuda, hip=hip)
    torch.device = lambda kind, index: index
    torch.cuda = SimpleNamespace(
        is_available=lambda: bool(cards),
        device_count=lambda: len(cards),
        get_device_properties=lambda index: SimpleNamespace(
            name=cards[index][0], total_memory=80 << 30
        ),
    )
    target = ModuleType("polysilicon_torch.target")

    class UnsupportedTarget(PolysiliconError):
        pass

    def detect(index):
        if cards[index][1] == "gfx900":
            raise UnsupportedTarget("gfx900 is too old")
        return SimpleNamespace(name=cards[index][1])

    target.UnsupportedTarget, target.detect = UnsupportedTarget, detect
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "polysilicon_torch.target", target)
    found = {"torch": True, "triton": triton}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name] or None)


def reason() -> str:
    found = ROCmBackend().probe()
    assert isinstance(found, Unavailable)
    return found.reason


def test_without_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert reason().startswith(f"torch is not installed: {INSTALL}")
    assert "pip install 'polysilicon[rocm]'" in reason()


def test_with_a_torch_that_does_not_load(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libamdhip64.so: no such file\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert reason().startswith(
        f"torch cannot be imported (libamdhip64.so: no such file): {INSTALL}"
    )


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        ({}, ("built for CPUs", INSTALL)),
        ({"cuda": "12.8"}, ("built for CUDA, which the cuda backend runs on", INSTALL)),
        ({"hip": "6.4", "triton": False}, ("triton", "missing")),
        ({"hip": "6.4"}, ("sees no GPU", "rocm-smi", "HIP_VISIBLE_DEVICES")),
        ({"hip": "6.4", "cards": [("Vega", "gfx900")]}, ("Vega: gfx900 is too old",)),
    ],
    ids=["cpu", "cuda", "no-triton", "no-card", "old-card"],
)
def test_why_not(monkeypatch, torch, words):
    play_torch(monkeypatch, **torch)
    for word in words:
        assert word in reason()


def test_cards_that_can_run(monkeypatch):
    """Named by the details: what torch was built for, and torch's index of each."""
    cards = [("Vega", "gfx900"), ("MI300X", "gfx942")]
    play_torch(monkeypatch, hip="6.4", cards=cards)
    [info] = ROCmBackend().probe()
    assert info.name == "MI300X"
    assert info.memory == 80 << 30
    assert info.details == {
        "architecture": "gfx942", "torch": "2.11.0, built for ROCm 6.4", "index": "1",
    }  # fmt: skip


def test_importing_it_loads_no_torch():
    code = (
        "import sys, polysilicon_rocm.plugin as p; p.polysilicon_backends(); "
        "print(*{'torch', 'triton', 'polysilicon_torch'} & set(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert loaded.stdout.split() == []


def test_it_is_named_with_its_reason(monkeypatch):
    """It is installed by its entry point, its stand-in on the host is not, and asking for it where
    it cannot run says why."""
    monkeypatch.setattr(presence, "find_devices", lambda vendor: Unavailable(reason="no reason"))
    plugins = load_plugins()
    names = [backend.name for backend in plugins.backends]
    assert "rocm" in names
    assert not [name for name in names if name.endswith("-host")]
    with pytest.raises(PluginError, match="backend 'rocm' cannot run here: no reason"):
        select_backend(plugins, "rocm")
