"""This vendor's tuning tables: the JSON files beside this one (`polysilicon_torch.tuning`)."""

from __future__ import annotations

import functools
from pathlib import Path

from polysilicon_torch.tuning import Table, read_tables


@functools.cache
def table() -> Table:
    return read_tables(Path(__file__).parent)
