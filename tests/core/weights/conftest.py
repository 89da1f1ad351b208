"""What tests of weights share."""

from __future__ import annotations

import pytest

from .gguf_builder import GGUFBuilder


@pytest.fixture(scope="session")
def build() -> GGUFBuilder:
    return GGUFBuilder()
