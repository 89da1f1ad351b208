"""polysilicon in fresh environments, with what the package index gives: each extra, and the OpenCL
plugin beside it.

It is called by name, as it needs an index, minutes and up to 6 GB (torch for CUDA):

    python -m pytest tests/packaging/clean_rooms.py
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BACKENDS = {"cuda", "rocm", "metal", "cpu", "reference"}
MISSING = {
    "cuda": "torch is not installed: pip install 'polysilicon[cuda]'",
    "rocm": "torch is not installed: install torch from the ROCm index",
    "metal": "mlx is not installed: pip install 'polysilicon[metal]'",
    "cpu": "POLYSILICON_CPU_BUILD=0",
}
"""What backends say in an environment without what they need; the wheel has no native code."""

pytestmark = pytest.mark.timeout(3600)

VENDOR = {"torch", "triton", "mlx", "pyopencl", "llama-cpp-python"}


@pytest.fixture
def environment(
    tmp_path: Path, new_environment: Callable[[Path], Any]
) -> Iterator[Any]:  # fmt: skip
    yield new_environment(tmp_path)
    shutil.rmtree(tmp_path)


def packages(environment: Any) -> set[str]:
    """Names of what is installed."""
    return {line.partition("==")[0].lower() for line in environment.pip("freeze").splitlines()}


def check_others(backends: dict[str, dict[str, Any]], *own: str) -> None:
    """Every other backend is there, and says what it misses."""
    assert backends.keys() == BACKENDS
    assert backends["reference"]["status"] == "available"
    for name in MISSING.keys() - set(own):
        assert backends[name]["status"] == "unavailable", name
        assert MISSING[name] in backends[name]["reason"]


@pytest.mark.parametrize("extra", ["", "bench", "otel"])
def test_without_a_vendor(environment: Any, wheel: Path, extra: str) -> None:
    environment.pip("install", f"{wheel}[{extra}]" if extra else str(wheel))
    environment.pip("check")
    check_others(environment.backends())
    assert not packages(environment) & VENDOR
    assert {e["name"]: e["status"] for e in environment.json("backends")["executors"]} == {
        "llamacpp": "unavailable"
    }
    assert ("matplotlib" in packages(environment)) == (extra == "bench")
    assert ("opentelemetry-sdk" in packages(environment)) == (extra == "otel")


def test_cpu(environment: Any, native_wheel: Path) -> None:
    environment.pip("install", f"{native_wheel}[cpu]")
    backends = environment.backends()
    check_others(backends, "cpu")
    assert backends["cpu"]["status"] == "available"
    assert not packages(environment) & VENDOR


def test_cpu_from_the_sdist(environment: Any, sdist: Path) -> None:
    """Where there is a compiler, as for `native_wheel`."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    environment.pip("install", f"{sdist}[cpu]")
    assert environment.backends()["cpu"]["status"] == "available"


def test_metal(environment: Any, wheel: Path) -> None:
    environment.pip("install", f"{wheel}[metal]")
    environment.pip("check")
    backends = environment.backends()
    check_others(backends, "metal")
    assert backends["metal"]["status"] == "available"
    assert packages(environment) & VENDOR == {"mlx"}
    if sys.platform == "linux":
        assert "MLX on CPU" in backends["metal"]["devices"][0]["name"]


@pytest.mark.parametrize("extra", ["cuda", "rocm"])
def test_torch(environment: Any, wheel: Path, extra: str) -> None:
    """Whether there is such a device or not: then the reason is no missing package."""
    environment.pip("install", f"{wheel}[{extra}]")
    environment.pip("check")
    backends = environment.backends()
    check_others(backends, "cuda", "rocm")
    assert "torch" in packages(environment)
    for name in ("cuda", "rocm"):
        assert backends[name]["status"] == "available" or backends[name]["reason"]
        assert "torch is not installed" not in backends[name]["reason"]


def test_llamacpp(environment: Any, wheel: Path) -> None:
    environment.pip("install", f"{wheel}[llamacpp]")
    check_others(environment.backends())
    assert {e["name"]: e["status"] for e in environment.json("backends")["executors"]} == {
        "llamacpp": "available"
    }


def test_the_opencl_plugin(
    environment: Any, wheel: Path, tmp_path: Path, build: Callable[..., Path]
) -> None:
    """Its own wheel brings pyopencl; without a driver it says how to get one."""
    environment.pip("install", str(wheel))
    plugin = build(ROOT / "plugins" / "opencl", tmp_path / "plugin", "wheel")
    environment.pip("install", str(plugin))
    environment.pip("check")
    backends = environment.backends()
    opencl = backends.pop("opencl")
    check_others(backends)
    assert packages(environment) & VENDOR == {"pyopencl"}
    assert opencl["distribution"] == "polysilicon-opencl"
    assert opencl["status"] == "available" or "pocl-opencl-icd" in opencl["reason"]
    environment.pip("uninstall", "-y", "polysilicon-opencl")
    assert environment.backends().keys() == BACKENDS
