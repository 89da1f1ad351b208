"""`polysilicon serve`: an HTTP server with OpenAI's and Anthropic's interfaces."""

from __future__ import annotations

from typing import Annotated

import typer

from polysilicon import progress
from polysilicon.catalogue import DEFAULT_MODEL, resolve_model
from polysilicon.commands.options import configured
from polysilicon.commands.session import ENGINE_FIELDS
from polysilicon.config import SERVER_FIELDS, Config
from polysilicon.server.settings import SAMPLING_DEFAULTS


@configured(ENGINE_FIELDS | SERVER_FIELDS | SAMPLING_DEFAULTS | {"chat_template"})
def serve(
    config: Config,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Catalogue name, path or hf:owner/repo[:file]."),
    ] = None,
) -> None:
    """Serve a model over HTTP. Sampling options are what requests get that say nothing else."""
    # Kept out of the other commands, which must start fast.
    from polysilicon.server.serving import run

    config = config.model_copy(update={"model": model or config.model or DEFAULT_MODEL})
    run(config, resolve_model(config.model, progress=progress.bar))
