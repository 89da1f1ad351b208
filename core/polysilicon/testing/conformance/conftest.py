"""Fixtures of the kit: the backend under test, its device, and random inputs."""

from __future__ import annotations

import importlib
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from polysilicon.backend import Backend, Device, Unavailable
from polysilicon.plugins import load_plugins
from polysilicon.testing.kit import Kit
from polysilicon.testing.pairs import cover_pairs

_SEED = pytest.StashKey[int]()
_NO_BACKEND = (
    "the conformance kit judges a backend: name it with --polysilicon-backend NAME, or in the "
    "setting polysilicon_backends"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend_name" in metafunc.fixturenames:
        config = metafunc.config
        names = config.getoption("polysilicon_backend") or config.getini("polysilicon_backends")
        metafunc.parametrize("backend_name", names or ["no-backend"], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is expected to fail, in `PATTERN: REASON` lines; strictly. Leave out what
    `--polysilicon-pairs` does not ask for."""
    folder = Path(__file__).parent
    if config.getoption("polysilicon_pairs"):
        _keep_pairs(folder, items)
    for line in config.getini("polysilicon_xfail"):
        pattern, separator, reason = line.partition(": ")
        if not separator or not reason.strip():
            raise pytest.UsageError(
                f"polysilicon_xfail takes lines of the form `PATTERN: REASON`, got {line!r}"
            )
        matches = re.compile(re.escape(pattern.strip()).replace(r"\*", ".*")).fullmatch
        for item in items:
            if item.path.parent == folder and matches(f"{item.path.name}::{item.name}"):
                item.add_marker(pytest.mark.xfail(reason=reason.strip(), strict=True))


def _keep_pairs(folder: Path, items: list[pytest.Item]) -> None:
    tests: dict[tuple[object, ...], list[tuple[pytest.Item, dict[str, str]]]] = {}
    for item in items:
        if item.path.parent == folder and isinstance(item, pytest.Function):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            values = {name: repr(value) for name, value in parameters.items()}
            test = (item.path, item.originalname, values.pop("backend_name", None))
            tests.setdefault(test, []).append((item, values))
    left_out: set[pytest.Item] = set()
    for own in tests.values():
        kept = cover_pairs([values for _, values in own])
        left_out |= {item for place, (item, _) in enumerate(own) if place not in kept}
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def backend(backend_name: str) -> Backend:
    """The backend under test, from an installed plugin or from a module."""
    if backend_name == "no-backend":
        pytest.fail(_NO_BACKEND, pytrace=False)
    module, separator, name = backend_name.rpartition(":")
    plugins = load_plugins()
    candidates: Sequence[Backend] = plugins.backends
    if separator:
        candidates = importlib.import_module(module).polysilicon_backends()
    for candidate in candidates:
        if candidate.name == name:
            return candidate
    record = plugins.record_of(backend_name)
    known = ", ".join(candidate.name for candidate in candidates)
    why = f"{record.status.value}: {record.reason}" if record else f"there are {known}"
    pytest.fail(f"no backend is called {backend_name!r} ({why})", pytrace=False)


@pytest.fixture(scope="session")
def open_device(
    backend: Backend, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Device]]:
    """Opens the device under test, with options beside those of the command line; closes what it
    opened at the end."""
    index: int = request.config.getoption("polysilicon_device")
    given = dict(option.split("=", 1) for option in request.config.getoption("polysilicon_option"))
    opened: list[Device] = []

    def open_device(options: Mapping[str, str] | None = None) -> Device:
        found = backend.probe()
        if isinstance(found, Unavailable):
            pytest.fail(f"backend {backend.name!r} cannot run here: {found.reason}", pytrace=False)
        if not 0 <= index < len(found):
            pytest.fail(f"backend {backend.name!r} has {len(found)} devices", pytrace=False)
        device = backend.open(index, given | dict(options or {}))
        opened.append(device)
        return device

    yield open_device
    for device in opened:
        device.close()


@pytest.fixture(scope="session")
def device(open_device: Callable[..., Device]) -> Device:
    """The device under test, one for the whole run."""
    return open_device()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random inputs of one test: fresh in every run, the same for a seed whatever else is run."""
    config = request.config
    given: int | None = config.getoption("polysilicon_seed")
    seed = config.stash.setdefault(_SEED, secrets.randbits(31) if given is None else given)
    print(f"inputs: --polysilicon-seed {seed}")
    return np.random.default_rng([seed, zlib.crc32(request.node.name.encode())])


@pytest.fixture
def kit(device: Device, rng: np.random.Generator) -> Kit:
    return Kit(device, rng)
