"""What torch raises, as the contract's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from polysilicon.backend import DeviceLost, OutOfMemory

_LOST = ("CUDA error", "HIP error", "CUBLAS_STATUS", "HIPBLAS_STATUS", "CUDA driver error")
_FULL = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


@contextlib.contextmanager
def contract_errors(what: str) -> Iterator[None]:
    """Raise OutOfMemory or DeviceLost for what torch raises of a device; what: what was tried."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{what}: {_first_line(error)}") from error
    except RuntimeError as error:
        text = str(error)
        if any(words in text for words in _FULL):
            raise OutOfMemory(f"{what}: {_first_line(error)}") from error
        if isinstance(error, torch.AcceleratorError) or any(words in text for words in _LOST):
            raise DeviceLost(f"{what}: {_first_line(error)}") from error
        raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
