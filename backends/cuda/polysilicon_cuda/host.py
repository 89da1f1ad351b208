"""This backend's device on the host, for tests: see `polysilicon_torch.host`."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon.backend import Backend
from polysilicon_torch.host import HostBackend
from polysilicon_torch.presence import CUDA

TARGETS = ("sm_90", "sm_80", "sm_89", "sm_100")


def polysilicon_backends() -> Sequence[Backend]:
    return (HostBackend(CUDA, "polysilicon_cuda", TARGETS),)
