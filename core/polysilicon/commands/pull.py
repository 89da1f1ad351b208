"""`polysilicon pull`: fetch a model without running it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def pull(
    model: Annotated[
        str | None,
        typer.Argument(help="Catalogue name, path or hf:owner/repo[:file].", metavar="MODEL"),
    ] = None,
) -> None:
    """Fetch a model, smollm2 by default, and print where it is."""
    from polysilicon.catalogue import CATALOGUE, DEFAULT_MODEL, resolve_model
    from polysilicon.progress import bar

    entry = CATALOGUE.get(model or DEFAULT_MODEL)
    path = resolve_model(model, progress=bar)
    if entry is not None and entry.notice:
        print(entry.notice, file=sys.stderr)
    print(path)
