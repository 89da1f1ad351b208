"""Session fixtures for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def _model(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"set {variable} to the path of the model file")
    return Path(value)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _model("POLYSILICON_TEST_SMOLLM2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return _model("POLYSILICON_TEST_GEMMA3")
