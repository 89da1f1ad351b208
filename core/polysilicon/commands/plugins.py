"""`polysilicon plugins`: what is installed and what became of it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed plugins: status, version, distribution, supplies, reason."""
    from polysilicon.commands.output import print_json, print_table
    from polysilicon.plugins import load_plugins

    records = load_plugins().records
    if as_json:
        print_json([dataclasses.asdict(record) for record in records])
        return
    if not records:
        print("No plugin is installed, not even polysilicon's own: install it (pip install -e .)")
        return
    print_table(
        ("plugin", "status", "distribution", "supplies", "reason"),
        [
            (
                record.name,
                record.status,
                f"{record.distribution} {record.version}".strip(),
                ", ".join((*record.backends, *record.executors, *record.checkpoint_formats)),
                record.reason,
            )
            for record in records
        ],
    )
