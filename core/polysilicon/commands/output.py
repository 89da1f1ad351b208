"""What the listing commands share: JSON, and tables that fit a terminal and a pipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 10_000


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows as a table: long cells wrap in a terminal, and a row is one line in a pipe."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text keeps brackets in reasons, such as an extra's, from being read as markup.
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
