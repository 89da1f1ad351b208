"""Fixtures of the plugin's tests: devices of both kinds of work-groups, two real models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from polysilicon.backend import Device, Unavailable
from polysilicon.catalogue import resolve_model

from polysilicon_opencl.plugin import OpenCLBackend


@pytest.fixture(scope="session")
def backend() -> OpenCLBackend:
    backend = OpenCLBackend()
    found = backend.probe()
    if isinstance(found, Unavailable):
        pytest.skip(found.reason)
    return backend


@pytest.fixture(scope="session", params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, backend: OpenCLBackend) -> Iterator[Device]:
    """With each of the two kinds of work-groups."""
    device = backend.open(0, {"shapes": request.param})
    yield device
    device.close()


def _model(name: str, variable: str) -> Path:
    return Path(os.environ[variable]) if os.environ.get(variable) else resolve_model(name)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, a GGUF file."""
    return _model("smollm2", "POLYSILICON_TEST_SMOLLM2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """gemma-3-270m Q4_K_M, a GGUF file."""
    return _model("gemma3-270m", "POLYSILICON_TEST_GEMMA3")
