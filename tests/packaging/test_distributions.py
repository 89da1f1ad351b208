"""What is in the wheel and the sdist, and that the wheel works where it is installed."""

from __future__ import annotations

import configparser
import email
import json
import subprocess
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Build = Callable[..., Path]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


PACKAGES = [
    ROOT / folder for folder in PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
]
LIBRARY = "polysilicon_cpu/libpolysilicon_cpu.so"
FAILURE = "polysilicon_cpu/build-failure.txt"


def tree() -> set[str]:
    """The files of the packages, as they should stand in a wheel."""
    return {
        path.relative_to(package.parent).as_posix()
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file()
        and not {"__pycache__", "native"} & set(path.relative_to(package).parts)
        and path.name not in (Path(LIBRARY).name, Path(FAILURE).name)
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
    assert packaged == tree() | {FAILURE}
    assert "polysilicon/py.typed" in packaged
    assert any(name.endswith(".json") for name in packaged)


def test_a_wheel_without_native_code_is_for_every_platform(wheel: Path) -> None:
    assert wheel.name == f"polysilicon-{PROJECT['version']}-py3-none-any.whl"


def test_a_wheel_with_native_code_is_for_this_platform(native_wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert native_wheel.name == f"polysilicon-{PROJECT['version']}-py3-none-{platform}.whl"
    packaged = {name for name in names(native_wheel) if ".dist-info/" not in name}
    assert packaged == tree() | {LIBRARY}
    assert "Root-Is-Purelib: false" in of_dist_info(native_wheel, "WHEEL")


def test_without_a_compiler_the_wheel_says_why(tmp_path: Path, build: Build) -> None:
    missing = {"CXX": "/nowhere/c++", "POLYSILICON_CPU_BUILD": "1"}
    wheel = build(ROOT, tmp_path, "wheel", missing)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "/nowhere/c++" in archive.read(FAILURE).decode()


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
    """Or an executor: entry point, extra, folder and lane; the reference needs no extra, and some
    extras are of the core. A lane with `install` is a third party's, which stands in `plugins`."""
    points = set(PROJECT["entry-points"]["polysilicon"])
    matrix = json.loads((ROOT / "ci/matrix.json").read_text())
    installs = {
        lane.get("backend") or lane["executor"]: lane.get("install") for lane in matrix["lanes"]
    }
    lanes = {name for name, install in installs.items() if install is None}
    folders = {path.name for path in (ROOT / "backends").glob("*") if path.name != "torch"}
    extras = set(PROJECT["optional-dependencies"]) - {"test", "bench", "otel"}
    assert points == lanes == folders | {"reference"}
    assert extras == folders
    for name in set(installs) - lanes:
        assert installs[name] == f"plugins/{name}"
        assert (ROOT / "plugins" / name / "pyproject.toml").is_file()


def test_the_sdist_builds_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path, build: Build
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("README.md", "LICENSE", "pyproject.toml", "tests/conftest.py", "ci/matrix.json"):
        assert (source / name).is_file(), name
    assert names(build(source, tmp_path / "built", "wheel")) == names(wheel)


OFFLINE = ("--no-deps", "--no-index")


def test_the_installed_wheel_runs(
    wheel: Path, tmp_path: Path, borrowing_environment: Callable[[Path], Any]
) -> None:
    environment = borrowing_environment(tmp_path)
    environment.pip("install", *OFFLINE, str(wheel))
    assert environment.polysilicon("--version") == PROJECT["version"] + "\n"
    plugins = {plugin["name"]: plugin for plugin in environment.json("plugins")}
    assert plugins.keys() == PROJECT["entry-points"]["polysilicon"].keys()
    assert plugins["reference"] == {
        "name": "reference",
        "distribution": "polysilicon",
        "version": PROJECT["version"],
        "status": "loaded",
        "reason": "",
        "backends": ["reference"],
        "executors": [],
        "checkpoint_formats": [],
    }
    backends = environment.backends()
    assert backends["reference"]["status"] == "available"
    assert backends["cpu"]["status"] == "unavailable"
    assert "POLYSILICON_CPU_BUILD=0" in backends["cpu"]["reason"]
    assert "apt-get install g++" in backends["cpu"]["reason"]
    place = subprocess.check_output(
        [environment.python, "-c", "import polysilicon; print(polysilicon.__file__)"],
        cwd=tmp_path, text=True,
    )  # fmt: skip
    assert str(tmp_path / "environment") in place


def test_the_installed_native_wheel_runs(
    native_wheel: Path, tmp_path: Path, borrowing_environment: Callable[[Path], Any]
) -> None:
    environment = borrowing_environment(tmp_path)
    environment.pip("install", *OFFLINE, str(native_wheel))
    assert environment.backends()["cpu"]["status"] == "available"
