"""What the cuda and rocm backends say of an environment, and that they load nothing before they are
asked. They need neither torch nor a card: torch is played by modules of the tests'.
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from polysilicon.backend import Unavailable
from polysilicon.errors import PluginError, PolysiliconError
from polysilicon.plugins import load_plugins
from polysilicon.selection import select_backend
from polysilicon_torch import presence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vendor:
    """A backend's own words. install: how to get its torch, `other`: whose torch is no use to it.
    version: the attribute of `torch.version` for it. cards: by name and architecture, one too old,
    one that can run. library: what its torch fails to load."""

    name: str
    install: tuple[str, ...]
    platform: str
    version: str
    other: str
    tools: tuple[str, ...]
    cards: tuple[tuple[str, str], ...]
    library: str

    def reason(self) -> str:
        module = importlib.import_module(f"polysilicon_{self.name}.plugin")
        [backend] = module.polysilicon_backends()
        assert backend.name == self.name
        found = backend.probe()
        assert isinstance(found, Unavailable)
        return found.reason


VENDORS = {
    "cuda": Vendor(
        name="cuda",
        install=("pip install 'polysilicon[cuda]'",),
        platform="CUDA",
        version="cuda",
        other="rocm",
        tools=("nvidia-smi", "CUDA_VISIBLE_DEVICES"),
        cards=(("GTX 780", "sm_30"), ("H200", "sm_90")),
        library="libcudart.so.12",
    ),
    "rocm": Vendor(
        name="rocm",
        install=(
            "install torch from the ROCm index that pytorch.org names",
            "pip install 'polysilicon[rocm]'",
        ),
        platform="ROCm",
        version="hip",
        other="cuda",
        tools=("rocm-smi", "HIP_VISIBLE_DEVICES"),
        cards=(("Vega", "gfx900"), ("MI300X", "gfx942")),
        library="libamdhip64.so",
    ),
}


@pytest.fixture(params=VENDORS)
def vendor(request):
    return VENDORS[request.param]


def play_torch(monkeypatch, *, built_for=None, cards=(), triton=True):
    """An environment whose torch is built for a vendor's cards and sees some, each by name and
    architecture."""
    torch = ModuleType("torch")
    torch.__version__ = "2.11.0"
    torch.version = SimpleNamespace(cuda=None, hip=None)
    if built_for is not None:
        setattr(torch.version, built_for.version, "12.8")
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
        name = cards[index][1]
        if name in ("sm_30", "gfx900"):
            raise UnsupportedTarget(f"{name} is too old")
        return SimpleNamespace(name=name)

    target.UnsupportedTarget, target.detect = UnsupportedTarget, detect
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "polysilicon_torch.target", target)
    found = {"torch": True, "triton": triton}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[name] or None)


def test_with_a_torch_that_does_not_load(monkeypatch, tmp_path, vendor):
    error = f"{vendor.library}: no such file"
    (tmp_path / "torch.py").write_text(f"raise OSError('{error}\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    expected = f"torch cannot be imported ({error}): {vendor.install[0]}"
    assert vendor.reason().startswith(expected)


@pytest.mark.parametrize("case", ["cpu", "other", "no-triton", "no-card", "old-card"])
def test_why_not(monkeypatch, vendor, case):
    other = VENDORS[vendor.other]
    torch, words = {
        "cpu": ({}, ("built for CPUs", *vendor.install)),
        "other": (
            {"built_for": other},
            (f"built for {other.platform}, which the {other.name} backend", *vendor.install),
        ),
        "no-triton": ({"built_for": vendor, "triton": False}, ("triton", "missing")),
        "no-card": ({"built_for": vendor}, ("sees no GPU", *vendor.tools)),
        "old-card": (
            {"built_for": vendor, "cards": vendor.cards[:1]},
            (": ".join(vendor.cards[0]) + " is too old",),
        ),
    }[case]
    play_torch(monkeypatch, **torch)
    for word in words:
        assert word in vendor.reason()


def test_cards_that_can_run(monkeypatch, vendor):
    """Named by the details: what torch was built for, and torch's index of each."""
    play_torch(monkeypatch, built_for=vendor, cards=vendor.cards)
    [info] = presence.find_devices(
        next(known for known in presence.VENDORS if known.backend == vendor.name)
    )
    name, architecture = vendor.cards[1]
    assert info.name == name
    assert info.memory == 80 << 30
    assert info.details == {
        "architecture": architecture,
        "torch": f"2.11.0, built for {vendor.platform} 12.8",
        "index": "1",
    }


def test_it_is_named_with_its_reason(monkeypatch, vendor):
    """It is installed by its entry point, its stand-in on the host is not, and asking for it where
    it cannot run says why."""
    monkeypatch.setattr(presence, "find_devices", lambda vendor: Unavailable(reason="no reason"))
    plugins = load_plugins()
    names = [backend.name for backend in plugins.backends]
    assert vendor.name in names
    assert not [name for name in names if name.endswith("-host")]
    with pytest.raises(PluginError, match=f"'{vendor.name}' cannot run here: no reason"):
        select_backend(plugins, vendor.name)


def run(code: str, *folders: Path) -> str:
    """What Python prints in an environment that has these folders before all others."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_importing_it_loads_no_torch(vendor):
    loaded = run(
        f"import sys, polysilicon_{vendor.name}.plugin as p; p.polysilicon_backends(); "
        "print(*{'torch', 'triton', 'polysilicon_torch'} & set(sys.modules))"
    )
    assert loaded.split() == []


def listed(code: str, *folders: Path) -> dict[str, dict]:
    """What `polysilicon backends` says of the two, after some code has run."""
    command = "import sys; from polysilicon.cli import main; sys.argv = ['', 'backends', '--json']"
    entries = json.loads(run(f"{code}; {command}; main()", *folders))["backends"]
    return {entry["name"]: entry for entry in entries if entry["name"] in VENDORS}


def test_both_without_torch():
    """Each is listed, with how to install it."""
    without = (
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name in ('torch', 'triton') else find(name, *a)"
    )
    entries = listed(without)
    assert entries.keys() == VENDORS.keys()
    for name, entry in entries.items():
        assert entry["status"] == "unavailable"
        assert entry["reason"].startswith("torch is not installed: ")
        assert all(words in entry["reason"] for words in VENDORS[name].install)


TORCH = """
from types import SimpleNamespace

__version__ = "2.11.0"
version = SimpleNamespace(cuda=None, hip=None)
version.{version} = "12.8"


class device:
    def __init__(self, type, index):
        self.type = type


class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)

    @staticmethod
    def get_device_properties(device):
        return SimpleNamespace(
            name="{card}", total_memory=80 << 30, major=9, minor=0, gcnArchName="gfx942:sramecc+",
            multi_processor_count=100,
        )
"""


def test_both_with_one_torch(tmp_path, vendor):
    """The one whose cards torch was built for finds them; the other says which one that is. To open
    one takes more than a torch that is played."""
    name, architecture = vendor.cards[1]
    (tmp_path / "torch.py").write_text(TORCH.format(version=vendor.version, card=name))
    (tmp_path / "triton.py").write_text("")
    entries = listed("pass", tmp_path)
    own, other = entries[vendor.name], entries[vendor.other]
    [card] = own["devices"]
    assert card["name"] == name
    assert card["details"]["architecture"] == architecture
    assert card["details"]["torch"] == f"2.11.0, built for {vendor.platform} 12.8"
    assert other["status"] == "unavailable"
    assert f"built for {vendor.platform}, which the {vendor.name} backend runs" in other["reason"]
    assert all(words in other["reason"] for words in VENDORS[vendor.other].install)
