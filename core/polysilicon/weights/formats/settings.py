"""What a checkpoint's own files say of its quantisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from polysilicon.errors import ModelError
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import shown
from polysilicon.weights.safetensors import CONFIG_NAME, SafetensorsDirectory

# Where config.json says it, and the method where the key alone says that. MLX writes its own key
# and a copy as quantization_config.
_KEYS = {"quantization": "mlx", "quantization_config": "", "compression_config": ""}
# Files beside config.json that older tools write, and the method where the file alone says it.
_SIDECARS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": ""}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """What is said of a quantisation.

    method: `quant_method` in lower case, or what the place implies; empty where neither says it.
    fields: all of it.
    """

    method: str
    fields: Fields


def stated_settings(files: SafetensorsDirectory) -> Settings | None:
    """The settings of config.json, at the top or of its text model, or of a file beside it.

    None where nothing is said of a quantisation.
    """
    return next(_stated(files), None)


def _stated(files: SafetensorsDirectory) -> Iterator[Settings]:
    text_config = files.config.get("text_config")
    for part in (files.config, text_config if isinstance(text_config, dict) else {}):
        for key, implied in _KEYS.items():
            if part.get(key) is not None:
                yield _settings(part[key], f"{files.path / CONFIG_NAME}, {key},", implied)
    for name, implied in _SIDECARS.items():
        if name in files.sidecars:
            yield _settings(files.sidecars[name], str(files.path / name), implied)


def _settings(value: object, source: str, implied: str) -> Settings:
    values = value if isinstance(value, Mapping) else {}
    method = values.get("quant_method")
    return Settings(
        method=method.lower() if isinstance(method, str) else implied,
        fields=Fields(values, source),
    )


def expect_method(
    files: SafetensorsDirectory, format: str, methods: frozenset[str]
) -> Settings | None:
    """The settings, which must name one of `methods` or nothing: None where nothing is said.

    format: its name, for the error.
    """
    settings = stated_settings(files)
    if settings is not None and settings.method not in methods:
        method = shown(settings.method) if settings.method else "no quant_method"
        raise ModelError(
            f"{settings.fields.source} has {method}, which is not {format}. "
            "Leave --quantization out, so that the format is found from the files."
        )
    return settings
