"""A model's text side: tokenizer, chat template and sampling defaults, without its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from polysilicon.chat import ChatTemplate
from polysilicon.config import Config
from polysilicon.engine.loading import load_tokenizer
from polysilicon.errors import ConfigError, TemplateError
from polysilicon.generation import sampling_defaults
from polysilicon.tokenizer import Tokenizer
from polysilicon.weights.checkpoint import open_files

_MOST_TEMPLATE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelText:
    """chat_template: None where the model has none that works, and `no_chat` says why.
    sampling_defaults: what the model's authors recommend, by names of `SamplingParams`."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    no_chat: str
    sampling_defaults: dict[str, float | int]


def load_text(config: Config, path: Path) -> ModelText:
    """Read the text side of the checkpoint at `path`.

    Raises ModelError for a checkpoint that cannot be used, ConfigError and TemplateError for a
    `--chat-template` that cannot.
    """
    with open_files(path) as files:
        tokenizer = load_tokenizer(files)
        defaults = sampling_defaults(files)
    source = template_source(config)
    template, no_chat = None, ""
    try:
        template = ChatTemplate.for_tokenizer(tokenizer, source=source)
    except TemplateError as error:
        if source is not None:
            raise
        no_chat = str(error)
    return ModelText(
        tokenizer=tokenizer, chat_template=template, no_chat=no_chat, sampling_defaults=defaults
    )


def template_source(config: Config) -> str | None:
    """The text of `--chat-template FILE`. Raises ConfigError for a file that cannot be one."""
    if config.chat_template is None:
        return None
    try:
        with Path(config.chat_template).open("rb") as file:
            source = file.read(_MOST_TEMPLATE_BYTES + 1)
        if len(source) > _MOST_TEMPLATE_BYTES:
            raise ValueError("it is larger than 1 MiB, so no template")
        return source.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {config.chat_template}: {error}") from None
