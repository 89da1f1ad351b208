"""Opens backends for tests that compare several of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping

import pytest

from polysilicon.backend import Device, Unavailable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
    """A backend, by the module that supplies it as a plugin would, and options of its device."""

    module: str
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def opened_devices(openings: Mapping[str, Opening]) -> Iterator[Callable[[str], Device]]:
    """Opens devices by name, each once; skips the test where one cannot run, with its reason."""
    opened: list[Device] = []

    @functools.cache
    def find(name: str) -> Device | str:
        try:
            supplied = importlib.import_module(openings[name].module).polysilicon_backends()
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        (backend,) = supplied
        found = backend.probe()
        if isinstance(found, Unavailable):
            return found.reason
        opened.append(backend.open(0, openings[name].options))
        return opened[-1]

    def open_device(name: str) -> Device:
        found = find(name)
        if isinstance(found, str):
            pytest.skip(f"{name}: {found}")
        return found

    yield open_device
    for device in opened:
        device.close()
