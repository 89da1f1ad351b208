"""The distributions, built once from the working tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


PURE = {"POLYSILICON_CPU_BUILD": "0"}
"""Environment of a build without native code, which takes a minute."""

Build = Callable[..., Path]


def _build(source: Path, target: Path, into: str, environment: Mapping[str, str] = PURE) -> Path:
    """Build `wheel` or `sdist` with the backend that pyproject.toml names; the file."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", into, "--directory", str(target)],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="session")
def build() -> Build:
    return _build


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without native code."""
    return _build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="session")
def native_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with what a compiler made."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("there is no C++ compiler")
    environment = {"POLYSILICON_CPU_BUILD": "1"}
    return _build(ROOT, tmp_path_factory.mktemp("native"), "wheel", environment)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")
