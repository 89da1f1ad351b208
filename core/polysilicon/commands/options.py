"""Command-line flags made from the fields of `Config`, so that each name stands once."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from polysilicon.config import SAMPLING_FIELDS, SERVER_FIELDS, Config, load_config

Command = Callable[..., None]


def configured(fields: Collection[str]) -> Callable[[Command], Command]:
    """Give a command the flags of these fields and `--config FILE`.

    The command takes a parameter `config: Config`, which is taken out of its own flags and passed
    as the file's values with the flags that were given over them. The file may hold every name.
    """
    assert set(fields) <= set(Config.model_fields)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            file = arguments.pop("config")
            given = {name: arguments.pop(name) for name in fields}
            flags = {name: value for name, value in given.items() if value not in (None, [])}
            command(**arguments, config=load_config(file, flags))

        own = inspect.signature(command, eval_str=True).parameters
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own.values() if p.name != "config"]
        parameters.append(_parameter("config", Path, typer.Option(help=_CONFIG_HELP)))
        for name, field in Config.model_fields.items():
            if name in fields:
                parameters.append(_parameter(name, *_flag(name, field)))
        signature = inspect.Signature(parameters)
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        # typer would look through the wrapper for the annotations.
        del wrapper.__wrapped__
        return wrapper

    return decorate


_CONFIG_HELP = "YAML, TOML or JSON file with the same names; flags win over it."


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _flag(name: str, field: FieldInfo) -> tuple[Any, Any]:
    """The type that typer parses (texts and switches; pydantic does the rest) and the option."""
    flag = f"--{name.replace('_', '-')}"
    panel = "Engine"
    if name in SAMPLING_FIELDS | SERVER_FIELDS:
        panel = "Sampling" if name in SAMPLING_FIELDS else "Server"
    kind = _without_none(field.annotation)
    default = field.get_default(call_default_factory=True)
    help_text = field.description or ""
    if default not in (None, (), {}) and not isinstance(default, bool):
        help_text += f" Default: {default}."
    if kind is bool:
        negation = f"--no-{name.replace('_', '-')}"
        state = {None: "", True: " Default: on.", False: " Default: off."}[default]
        option = typer.Option(
            f"{flag}/{negation}", help=help_text + state, rich_help_panel=panel, show_default=False
        )
        return bool, option
    repeated = typing.get_origin(kind) in (tuple, dict)
    own_syntax = any(isinstance(item, BeforeValidator) for item in field.metadata)
    metavar = "TEXT" if own_syntax else {int: "INTEGER", float: "NUMBER"}.get(kind, "TEXT")
    option = typer.Option(
        flag, help=help_text, rich_help_panel=panel, metavar=metavar, show_default=False
    )
    return (list[str] if repeated else str), option


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation
