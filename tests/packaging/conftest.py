"""The distributions, built once from the working tree, and environments to install them in."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment of its own; what is called in it runs beside it."""

    python: Path

    def pip(self, *arguments: str) -> str:
        """What pip prints, which must succeed."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments]
        return self._call([*command, "--disable-pip-version-check"], {}, 1800)

    def polysilicon(self, *arguments: str, **environment: str) -> str:
        """What the program prints, which must succeed."""
        return self._call([str(self._program), *arguments], environment, 120)

    def json(self, *arguments: str, **environment: str) -> Any:
        """The same of a command that prints JSON."""
        return json.loads(self.polysilicon(*arguments, "--json", **environment))

    def backends(self, **environment: str) -> dict[str, dict[str, Any]]:
        """What `polysilicon backends` says, by name."""
        return {b["name"]: b for b in self.json("backends", **environment)["backends"]}

    def refusal(self, *arguments: str, **environment: str) -> str:
        """What the program says on standard error as it refuses to do as it is told."""
        done = self._run([str(self._program), *arguments], environment, 120)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    @property
    def _program(self) -> Path:
        return self.python.with_name("polysilicon" + (".exe" if os.name == "nt" else ""))

    def _call(self, command: list[str], environment: Mapping[str, str], timeout: int) -> str:
        done = self._run(command, environment, timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _run(
        self, command: list[str], environment: Mapping[str, str], timeout: int
    ) -> subprocess.CompletedProcess[str]:
        left_out = ("PYTHONPATH", "PYTHONHOME", "POLYSILICON_PLUGINS")
        outer = {name: value for name, value in os.environ.items() if name not in left_out}
        return subprocess.run(
            command, cwd=self.python.parent, env=outer | environment, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip


def _environment(folder: Path) -> Environment:
    """An empty one."""
    home = folder / "environment"
    venv.create(home, symlinks=os.name != "nt")
    return Environment(python=home / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def _borrowing(folder: Path) -> Environment:
    """One that has the packages of the environment here, except polysilicon's own, which would be
    there twice. It needs no network."""
    environment = _environment(folder)
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(packages).iterdir():
            if "polysilicon" not in path.name and path.suffix != ".pth":
                (dependencies / path.name).symlink_to(path)
    site = subprocess.check_output(
        [environment.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        text=True,
    ).strip()
    (Path(site) / "dependencies.pth").write_text(str(dependencies))
    return environment


@pytest.fixture(scope="session")
def new_environment() -> Callable[[Path], Environment]:
    return _environment


@pytest.fixture(scope="session")
def borrowing_environment() -> Callable[[Path], Environment]:
    return _borrowing
