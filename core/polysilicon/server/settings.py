"""What the HTTP server is told, read from the configuration."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from polysilicon.catalogue import CATALOGUE, DEFAULT_MODEL
from polysilicon.config import Config
from polysilicon.errors import ConfigError
from polysilicon.hub import PREFIX
from polysilicon.request import SLO

SAMPLING_DEFAULTS = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }
)
"""Sampling fields of `Config` that an operator may set for requests that leave them out."""

API_KEY_VARIABLE = "POLYSILICON_API_KEY"
_MOST_KEY_FILE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """model_names: that requests may give, the first in answers. api_keys: any of which opens the
    server; none for no authentication. request_timeout: seconds. max_body: bytes. cors_origins:
    origins of web pages that may call. sampling: the operator's sampling defaults. slo: of requests
    that bring none. kv_dtype: that was asked for. otlp_endpoint: where traces are sent.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    request_timeout: float = 600.0
    max_body: int = 8 << 20
    cors_origins: tuple[str, ...] = ()
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    slo: SLO = SLO()
    kv_dtype: str | None = None
    otlp_endpoint: str | None = None

    @classmethod
    def from_config(cls, config: Config, path: Path) -> Settings:
        """path: of the checkpoint. Without a name of its own the model is called as in the
        catalogue or on the hub, or as its file or folder.

        Raises ConfigError for a key file that cannot be used."""
        spec = config.model or DEFAULT_MODEL
        name = spec if spec in CATALOGUE or spec.startswith(PREFIX) else path.resolve().name
        said = {name: getattr(config, name) for name in SAMPLING_DEFAULTS}
        return cls(
            model_names=config.served_model_name or (name,),
            api_keys=_api_keys(config),
            request_timeout=config.request_timeout,
            max_body=config.max_body,
            cors_origins=config.cors_origin,
            sampling={name: value for name, value in said.items() if value is not None},
            slo=SLO(ttft=config.slo_ttft, tpot=config.slo_tpot),
            kv_dtype=config.kv_dtype,
            otlp_endpoint=config.otlp_endpoint,
        )


def _api_keys(config: Config) -> tuple[str, ...]:
    keys = [*config.api_key, os.environ.get(API_KEY_VARIABLE, "")]
    if config.api_key_file is not None:
        keys += _key_file(Path(config.api_key_file))
    found = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    if not all(key.isascii() and key.isprintable() and " " not in key for key in found):
        raise ConfigError("--api-key: a key is made of printable ASCII characters without spaces")
    return found


def _key_file(path: Path) -> list[str]:
    """The keys of a file, one a line; blank lines and lines that begin with # are left out."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_KEY_FILE_BYTES + 1)
        if len(content) > _MOST_KEY_FILE_BYTES:
            raise ValueError("it is larger than 1 MiB: write one key a line")
        lines = [line.strip() for line in content.decode().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key: write one a line")
    return keys
