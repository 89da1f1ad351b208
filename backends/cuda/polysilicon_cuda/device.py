"""Opening a card of this vendor."""

from __future__ import annotations

from collections.abc import Mapping

from polysilicon.backend import Device
from polysilicon_cuda.tables import table
from polysilicon_torch.card import open_card
from polysilicon_torch.presence import CUDA


def open_device(index: int, options: Mapping[str, str]) -> Device:
    """See `polysilicon_torch.card.open_card`."""
    return open_card(CUDA, index, options, table())
