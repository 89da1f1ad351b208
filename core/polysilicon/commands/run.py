"""`polysilicon run`: continue one prompt."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from polysilicon.catalogue import names_model
from polysilicon.commands.options import configured
from polysilicon.commands.session import ENGINE_FIELDS, sampling, session, stream
from polysilicon.config import SAMPLING_FIELDS, Config
from polysilicon.errors import ConfigError, RequestError
from polysilicon.request import Request


@configured(ENGINE_FIELDS | (SAMPLING_FIELDS - {"n"}))
def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="Catalogue name, path or hf:owner/repo[:file] (default smollm2); the text to "
            "continue, or - for standard input.",
        ),
    ],
    config: Config,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print TTFT, TPOT and tokens/s on stderr.")
    ] = False,
) -> None:
    """Continue a prompt and stream the text."""
    if len(words) > 2:
        raise ConfigError("run takes [MODEL] PROMPT: put the prompt in quotes")
    if len(words) == 1 and names_model(words[0]):
        raise ConfigError(
            f"{words[0]} is a model, and a prompt is missing: "
            f'polysilicon run {shlex.quote(words[0])} "PROMPT"'
        )
    model, prompt = (None, words[0]) if len(words) == 1 else words
    if prompt == "-":
        prompt = sys.stdin.read()
    with session(config, model) as loaded:
        ids = loaded.tokenizer.encode(prompt, add_special=True, parse_special=True)
        if not ids:
            raise RequestError("the prompt is empty: write some text")
        params = sampling(config, loaded, max_tokens=128)
        stream(loaded, Request(id="run", prompt=tuple(ids), params=params), stats=stats)
