"""What the cuda backend says of an environment, and that it loads nothing before it is asked.

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
from polysilicon_cuda.plugin import CUDABackend
from polysilicon_torch import presence

INSTALL = "pip install 'polysilicon[cuda]'"


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
        if cards[index][1] == "sm_30":
            raise UnsupportedTarget("sm_30 is too old")
        return SimpleNamespace(name=cards[index][1])

    target.UnsupportedTarget, target.detect = UnsupportedTarget, detect
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "polysilicon_torch.target", target)
    found = {"torch": True, "triton": triton}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name] or None)


def reason() -> str:
    found = CUDABackend().probe()
    assert isinstance(found, Unavailable)
    return found.reason


def test_without_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert reason() == f"torch is not installed: {INSTALL}"


def test_with_a_torch_that_does_not_load(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: no such file\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert reason() == f"torch cannot be imported (libcudart.so.12: no such file): {INSTALL}"


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        ({}, ("built for CPUs", INSTALL)),
        ({"hip": "6.4"}, ("built for ROCm, which the rocm backend runs on", INSTALL)),
        ({"cuda": "12.8", "triton": False}, ("triton", "missing")),
        ({"cuda": "12.8"}, ("sees no GPU", "nvidia-smi", "CUDA_VISIBLE_DEVICES")),
        ({"cuda": "12.8", "cards": [("GTX 780", "sm_30")]}, ("GTX 780: sm_30 is too old",)),
    ],
    ids=["cpu", "rocm", "no-triton", "no-card", "old-card"],
)
def test_why_not(monkeypatch, torch, words):
    play_torch(monkeypatch, **torch)
    for word in words:
        assert word in reason()


def test_cards_that_can_run(monkeypatch):
    """Named by the details: what torch was built for, and torch's index of each."""
    cards = [("GTX 780", "sm_30"), ("H200", "sm_90")]
    play_torch(monkeypatch, cuda="12.8", cards=cards)
    [info] = CUDABackend().probe()
    assert info.name == "H200"
    assert info.memory == 80 << 30
    assert info.details == {
        "architecture": "sm_90", "torch": "2.11.0, built for CUDA 12.8", "index": "1",
    }  # fmt: skip


def test_importing_it_loads_no_torch():
    code = (
        "import sys, polysilicon_cuda.plugin as p; p.polysilicon_backends(); "
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
    assert "cuda" in names
    assert not [name for name in names if name.endswith("-host")]
    with pytest.raises(PluginError, match="backend 'cuda' cannot run here: no reason"):
        select_backend(plugins, "cuda")
