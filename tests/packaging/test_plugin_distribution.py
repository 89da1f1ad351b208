"""A third party's distribution, the OpenCL plugin's: installed from its wheel, blocked, downgraded
to another version of the contract, and uninstalled."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polysilicon.backend import CONTRACT_VERSION

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "plugins" / "opencl"
OFFLINE = ("--no-deps", "--no-index")
ASKED = ("run", "--backend", "opencl", "smollm2", "Hello")
OLD = (CONTRACT_VERSION[0] - 1, 7)


def edited(path: Path, pattern: str, new: str) -> None:
    """Replace what stands once in a file."""
    text, count = re.subn(pattern, new, path.read_text())
    assert count == 1, (path, pattern)
    path.write_text(text)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory, build: Callable[..., Path]) -> Path:
    return build(SOURCE, tmp_path_factory.mktemp("plugin"), "wheel")


@pytest.fixture(scope="module")
def old_plugin(tmp_path_factory: pytest.TempPathFactory, build: Callable[..., Path]) -> Path:
    """An earlier release, built for a contract of another major version."""
    source = tmp_path_factory.mktemp("old") / "opencl"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    edited(source / "pyproject.toml", r'\nversion = "[^"]*"', '\nversion = "0.0.1"')
    edited(source / "polysilicon_opencl/plugin.py", r"contract = \(.*\)", f"contract = {OLD}")
    return build(source, tmp_path_factory.mktemp("old_plugin"), "wheel")


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory, wheel: Path,
    borrowing_environment: Callable[[Path], Any],
) -> Any:  # fmt: skip
    """With polysilicon."""
    environment = borrowing_environment(tmp_path_factory.mktemp("third_party"))
    environment.pip("install", *OFFLINE, str(wheel))
    return environment


@pytest.fixture
def installed(environment: Any, plugin: Path) -> Any:
    """With the plugin as well."""
    environment.pip("install", *OFFLINE, str(plugin))
    return environment


def record(environment: Any, **variables: str) -> dict[str, Any]:
    """What `polysilicon plugins` says of it."""
    (found,) = (p for p in environment.json("plugins", **variables) if p["name"] == "opencl")
    return found


def test_the_wheel_has_the_kernels_and_no_tests(plugin: Path) -> None:
    with zipfile.ZipFile(plugin) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = SOURCE / "polysilicon_opencl"
    files = (path for path in package.rglob("*") if path.is_file())
    kept = {path.relative_to(SOURCE).as_posix() for path in files if path.suffix != ".pyc"}
    assert names == kept
    assert any(name.endswith(".cl") for name in names)


def test_installed(installed: Any) -> None:
    found = record(installed)
    assert (found["status"], found["distribution"]) == ("loaded", "polysilicon-opencl")
    backend = installed.backends()["opencl"]
    if backend["status"] != "available":
        assert backend["status"] == "unavailable"
        assert re.search("pip install pyopencl|apt-get install pocl", backend["reason"])
        assert backend["reason"] in installed.refusal(*ASKED)


@pytest.mark.parametrize("setting", ["-opencl", ""])
def test_blocked(installed: Any, setting: str) -> None:
    blocked = {"POLYSILICON_PLUGINS": setting}
    found = record(installed, **blocked)
    assert found["status"] == "blocked"
    assert "POLYSILICON_PLUGINS" in found["reason"]
    assert "opencl" not in installed.backends(**blocked)
    refusal = installed.refusal(*ASKED, **blocked)
    assert found["reason"] in refusal.replace("\n", " ")
    assert installed.backends()["opencl"]


def test_downgraded(installed: Any, old_plugin: Path, plugin: Path) -> None:
    installed.pip("install", *OFFLINE, str(old_plugin))
    found = record(installed)
    assert (found["status"], found["version"]) == ("incompatible", "0.0.1")
    ours, theirs = (".".join(map(str, version)) for version in (CONTRACT_VERSION, OLD))
    assert f"contract {theirs}" in found["reason"]
    assert ours in found["reason"]
    assert "upgrade" in found["reason"]
    assert "opencl" not in installed.backends()
    assert installed.backends()["reference"]["status"] == "available"
    assert found["reason"] in installed.refusal(*ASKED).replace("\n", " ")
    installed.pip("install", "--upgrade", *OFFLINE, str(plugin))
    assert record(installed)["status"] == "loaded"


def test_uninstalled(installed: Any) -> None:
    installed.pip("uninstall", "-y", "polysilicon-opencl")
    assert all(p["name"] != "opencl" for p in installed.json("plugins"))
    assert "opencl" not in installed.backends()
    assert "'opencl' is not installed" in installed.refusal(*ASKED)
