"""`polysilicon chat`: a conversation in the terminal, or one read line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from polysilicon.chat import ChatTemplate
from polysilicon.commands.options import configured
from polysilicon.commands.session import ENGINE_FIELDS, sampling, session, stream
from polysilicon.config import SAMPLING_FIELDS, Config
from polysilicon.engine.loading import Loaded
from polysilicon.engine.model_text import template_source
from polysilicon.request import Request


@configured(ENGINE_FIELDS | (SAMPLING_FIELDS - {"n"}) | {"chat_template"})
def chat(
    config: Config,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Catalogue name, path or hf:owner/repo[:file]."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message that comes first.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print TTFT, TPOT and tokens/s on stderr.")
    ] = False,
) -> None:
    """Talk with a chat model. An empty line is skipped; end with Ctrl-D or Ctrl-C."""
    with session(config, model) as loaded:
        template = ChatTemplate.for_tokenizer(loaded.tokenizer, source=template_source(config))
        messages = [{"role": "system", "content": system}] if system else []
        for turn, text in enumerate(_lines()):
            messages.append({"role": "user", "content": text})
            prompt = template.render(messages)
            answer = _answer(loaded, config, prompt, f"turn-{turn}", stats)
            messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    interactive = sys.stdin.isatty()
    while True:
        try:
            text = input("> ") if interactive else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if not interactive and not text:
            return
        if text.strip():
            yield text.strip()


def _answer(loaded: Loaded, config: Config, prompt: str, request_id: str, stats: bool) -> str:
    ids = loaded.tokenizer.encode(prompt, add_special=False, parse_special=True)
    request = Request(
        id=request_id,
        prompt=tuple(ids),
        params=sampling(config, loaded, max_tokens=None),
    )
    return stream(loaded, request, stats=stats)
