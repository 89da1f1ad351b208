"""This backend's device on the host, for tests: see `polysilicon_torch.host`."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon.backend import Backend
from polysilicon_torch.host import HostBackend
from polysilicon_torch.presence import ROCM

TARGETS = ("gfx942", "gfx90a", "gfx950", "gfx1100", "gfx1201")


def polysilicon_backends() -> Sequence[Backend]:
    return (HostBackend(ROCM, "polysilicon_rocm", TARGETS),)
