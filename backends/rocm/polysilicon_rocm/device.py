"""Opening a card of this vendor."""

from __future__ import annotations

from collections.abc import Mapping

from polysilicon.backend import Device
from polysilicon_rocm.tables import table
from polysilicon_torch.card import open_card
from polysilicon_torch.presence import ROCM


def open_device(index: int, options: Mapping[str, str]) -> Device:
    """See `polysilicon_torch.card.open_card`."""
    return open_card(ROCM, index, options, table())
