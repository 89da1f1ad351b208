"""The device of these tests, and a way into its ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polysilicon.backend import Unavailable
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.plugin import CPUBackend


@pytest.fixture(scope="session", autouse=True)
def _the_library_is_there() -> None:
    found = CPUBackend().probe()
    if isinstance(found, Unavailable):
        pytest.skip(found.reason)


@pytest.fixture
def device() -> Iterator[CPUDevice]:
    device = CPUBackend().open(0, {})
    assert isinstance(device, CPUDevice)
    yield device
    device.close()
