"""Fake distributions that are really found by importlib.metadata."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from polysilicon import plugins

_numbers = itertools.count()

PREAMBLE = """
from polysilicon.backend import DeviceInfo, Unavailable
from polysilicon.backend import hookimpl

class Fake:
    contract = (1, 0)
    priority = 0
    def __init__(self, name, devices=("one",), **changes):
        self.name = name
        self.devices = devices
        vars(self).update(changes)
    def probe(self):
        return [DeviceInfo(name=name, memory=1 << 30) for name in self.devices]
    def open(self, index, options):
        raise RuntimeError("there is no hardware behind it")
"""

Install = Callable[..., str]


def write_distribution(
    folder: Path,
    plugin: str,
    source: str,
    *,
    distribution: str | None = None,
    version: str = "1.0",
    value: str | None = None,
) -> str:
    """Write a distribution with one plugin into a folder of the search path; its module's name.

    value: the entry point's, in place of the module written from `source`.
    """
    distribution = distribution or f"fake-{plugin}"
    module = f"fake_plugin_{next(_numbers)}"
    (folder / f"{module}.py").write_text(PREAMBLE + textwrap.dedent(source))
    stem = re.sub(r"[-.]", "_", distribution)
    info = folder / f"{stem}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[polysilicon]\n{plugin} = {value or module}\n")
    return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder at the front of the search path. Of the in-tree plugins only the reference is
    found, whatever else this version brings."""
    monkeypatch.delenv("POLYSILICON_PLUGINS", raising=False)
    found = plugins._entries
    monkeypatch.setattr(
        plugins,
        "_entries",
        lambda distribution: [
            entry for entry in found(distribution) if not entry.in_tree or entry.name == "reference"
        ],
    )
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def install(site: Path) -> Install:
    """Install a plugin into `site`: `install(plugin, source, distribution=, version=, value=)`."""

    def write(plugin: str, source: str, **options: str) -> str:
        return write_distribution(site, plugin, source, **options)

    return write
