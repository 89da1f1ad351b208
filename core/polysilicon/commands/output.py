"""What the commands share that show results: JSON, tables that fit a terminal and a pipe, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polysilicon.errors import ConfigError

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


def write_file(path: Path, text: str) -> None:
    """Write a text; what no UTF-8 spells, as half of a surrogate pair from a user's JSON, is
    replaced. Raises ConfigError where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
