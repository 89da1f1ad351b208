"""What is in the wheel and the sdist, and that the wheel works where it is installed."""

from __future__ import annotations

import configparser
import email
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Build = Callable[[Path, Path, str], Path]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tree() -> set[str]:
    """The files of the packages, as they should stand in a wheel."""
    return {
        path.relative_to(ROOT / "core").as_posix()
        for path in (ROOT / "core" / "polysilicon").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def of_dist_info(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(member).decode()


def metadata(wheel: Path) -> Message:
    return email.message_from_string(of_dist_info(wheel, "METADATA"))


def test_the_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    packaged = {name for name in names(wheel) if ".dist-info/" not in name}
    assert packaged == tree()
    assert "polysilicon/py.typed" in packaged
    assert any(name.endswith(".json") for name in packaged)


def test_the_wheel_is_for_every_platform(wheel: Path) -> None:
    assert wheel.name == f"polysilicon-{PROJECT['version']}-py3-none-any.whl"


def test_the_metadata(wheel: Path) -> None:
    said = metadata(wheel)
    assert said["Name"] == "polysilicon"
    assert said["Requires-Python"] == ">=3.11"
    assert said["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    assert said.get_all("Provides-Extra") == sorted(PROJECT["optional-dependencies"])
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names(wheel))
    required = {
        line.split(">")[0].split(";")[0].strip()
        for line in said.get_all("Requires-Dist", [])
        if "extra ==" not in line
    }
    assert "numpy" in required
    assert "torch" not in required


def test_the_entry_points(wheel: Path) -> None:
    points = configparser.ConfigParser(delimiters=("=",))
    points.read_string(of_dist_info(wheel, "entry_points.txt"))
    assert dict(points["console_scripts"]) == {"polysilicon": "polysilicon.cli:main"}
    assert dict(points["polysilicon"]) == PROJECT["entry-points"]["polysilicon"]
    assert "polysilicon" in points["pytest11"]


def test_a_backend_has_one_name_everywhere() -> None:
    """Entry point, extra and lane; the reference needs no extra."""
    points = set(PROJECT["entry-points"]["polysilicon"])
    lanes = {lane["backend"] for lane in json.loads((ROOT / "ci/matrix.json").read_text())["lanes"]}
    folders = {path.name for path in (ROOT / "backends").glob("*") if path.name != "torch"}
    extras = set(PROJECT["optional-dependencies"]) - {"test"}
    assert points == lanes == folders | {"reference"}
    assert extras == folders


def test_the_sdist_builds_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path, build: Build
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("README.md", "LICENSE", "pyproject.toml", "tests/conftest.py", "ci/matrix.json"):
        assert (source / name).is_file(), name
    assert names(build(source, tmp_path / "built", "wheel")) == names(wheel)


@pytest.fixture
def python(wheel: Path, tmp_path: Path) -> Path:
    """The Python of a new environment with the wheel, and the dependencies of the one here."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=os.name != "nt")
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps",
            "--no-index", "--disable-pip-version-check", str(wheel),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # All but polysilicon itself, which would be there twice.
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(folder).iterdir():
            if "polysilicon" not in path.name and path.suffix != ".pth":
                (dependencies / path.name).symlink_to(path)
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    (Path(site) / "dependencies.pth").write_text(str(dependencies))
    return python


def test_the_installed_wheel_runs(python: Path, tmp_path: Path) -> None:
    program = python.with_name("polysilicon" + (".exe" if os.name == "nt" else ""))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def called(*arguments: str) -> str:
        return subprocess.check_output(
            [program, *arguments], cwd=tmp_path, env=environment, text=True, timeout=120
        )

    assert called("--version") == PROJECT["version"] + "\n"
    (reference,) = json.loads(called("plugins", "--json"))
    assert reference == {
        "name": "reference",
        "distribution": "polysilicon",
        "version": PROJECT["version"],
        "status": "loaded",
        "reason": "",
        "backends": ["reference"],
    }
    (backend,) = json.loads(called("backends", "--json"))["backends"]
    assert (backend["name"], backend["status"]) == ("reference", "available")
    place = subprocess.check_output(
        [python, "-c", "import polysilicon; print(polysilicon.__file__)"],
        cwd=tmp_path, env=environment, text=True,
    )  # fmt: skip
    assert str(tmp_path / "environment") in place
