"""What tests of single formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from polysilicon.backend import Device
from polysilicon.errors import ModelError
from polysilicon.reference.device import ReferenceDevice
from polysilicon.weights.checkpoint import open_checkpoint

from .checkpoints import Case, Written, write


class Refused(Protocol):
    def __call__(self, folder: Path, match: str, *, quantization: str = "auto") -> None: ...


@pytest.fixture(scope="session")
def reference() -> Iterator[Device]:
    device = ReferenceDevice()
    yield device
    device.close()


@pytest.fixture
def made(tmp_path: Path) -> Callable[[Case], Written]:
    """Writes the tiny Llama in a format."""
    return lambda case: write(tmp_path / "model", case, np.random.default_rng())


def read_all(folder: Path, quantization: str) -> None:
    with open_checkpoint(folder, quantization=quantization) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.weight(name)


@pytest.fixture
def refused() -> Refused:
    """Opening a checkpoint, or reading its tensors, raises one clear error."""

    def check(folder: Path, match: str, *, quantization: str = "auto") -> None:
        with pytest.raises(ModelError, match=match) as caught:
            read_all(folder, quantization)
        message = str(caught.value)
        assert str(folder) in message
        assert len(message) < 800
        # It says what to do.
        assert message.rstrip().endswith(".")

    return check
