"""`polysilicon run`: continue one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from polysilicon.commands.options import configured
from polysilicon.commands.session import ENGINE_FIELDS, Timing, sampling, session
from polysilicon.config import SAMPLING_FIELDS, Config
from polysilicon.errors import ConfigError, RequestError
from polysilicon.request import FinishReason, Request


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
    model, prompt = (None, words[0]) if len(words) == 1 else words
    if prompt == "-":
        prompt = sys.stdin.read()
    with session(config, model) as loaded:
        ids = loaded.tokenizer.encode(prompt, add_special=True, parse_special=True)
        if not ids:
            raise RequestError("the prompt is empty: write some text")
        params = sampling(config, loaded, max_tokens=128)
        timing = Timing()
        request = Request(id="run", prompt=tuple(ids), params=params)
        for output in loaded.client.generate([request]):
            timing.take(output)
            sys.stdout.write(output.text)
            sys.stdout.flush()
            if output.finish_reason is FinishReason.ERROR:
                raise RequestError(output.error or "the engine failed")
        sys.stdout.write("\n")
        if stats:
            print(timing.line(len(ids)), file=sys.stderr)
