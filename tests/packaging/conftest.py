"""The distributions, built once from the working tree."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


Build = Callable[[Path, Path, str], Path]


def _build(source: Path, target: Path, into: str) -> Path:
    """Build `wheel` or `sdist` with the backend that pyproject.toml names; the file."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", into, "--directory", str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=300,
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
    return _build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")
