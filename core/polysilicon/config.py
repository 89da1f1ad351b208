"""The one flat configuration: the same names in files, as command-line flags and in Python."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from polysilicon.errors import ConfigError
from polysilicon.request import SamplingParams
from polysilicon.suggest import nearest

_MAX_FILE_BYTES = 1 << 20
_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}


def _bytes(value: object) -> object:
    """`2GiB` or `500 MB` as bytes; anything else as it is."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,6})?)\s*([a-zA-Z]*)\s*", value)
    unit = match and _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError("write a number of bytes, or one with a unit such as 2GiB or 500MB")
    return int(float(match[1]) * unit)


def _pairs(value: object) -> object:
    """`["key=value", ...]` as a mapping; anything else as it is."""
    if not isinstance(value, (list, tuple)):
        return value
    pairs = {}
    for item in value:
        key, equals, text = str(item).partition("=")
        if not equals or not key:
            raise ValueError("write KEY=VALUE")
        pairs[key.strip()] = text.strip()
    return pairs


def _option_texts(value: object) -> object:
    """Option values as the texts that backends take: true is `1`, false `0`."""
    pairs = _pairs(value)
    if not isinstance(pairs, Mapping):
        return pairs
    return {
        key: str(int(item)) if isinstance(item, bool) else str(item)
        for key, item in pairs.items()
        if item is not None
    }


def _id_lists(value: object) -> object:
    """`["1,2,3", ...]` as lists of ids; anything else as it is."""
    if not isinstance(value, (list, tuple)):
        return value
    return [item.split(",") if isinstance(item, str) else item for item in value]


class Config(BaseModel):
    """Everything that a configuration file or the command line can say.

    Sampling fields are None where nothing was said, so that a model's own generation defaults can
    come in between; `sampling` puts them together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str | None = Field(
        default=None,
        description="Catalogue name, path or hf:owner/repo[:file]; smollm2 by default.",
    )
    backend: str = Field(
        default="auto", description="Backend to run on; auto takes the first that can."
    )
    executor: str = Field(
        default="auto",
        description="native runs model definitions on the backend, llamacpp runs GGUF files "
        "whole; auto takes llamacpp for architectures that only it knows.",
    )
    device: int = Field(default=0, ge=0, description="Index of the device.")
    quantization: str = Field(
        default="auto",
        description="Format of a directory of quantised safetensors, such as gptq, awq or mlx; "
        "auto finds it from the files.",
    )
    quantize: Literal["w4", "w8", "fp8"] | None = Field(
        default=None,
        description="Quantise a dense checkpoint while it is loaded: w4 (4 bits, a scale and a "
        "bias for 32), w8 (8 bits, a scale for 32) or fp8 (e4m3, a scale for each output).",
    )
    backend_option: Annotated[dict[str, str], BeforeValidator(_option_texts)] = Field(
        default_factory=dict,
        description="Option of the backend or executor, KEY=VALUE; may be repeated.",
    )
    block_plugins: tuple[str, ...] = Field(
        default=(), description="Plugin not to load; may be repeated."
    )
    activations: Literal["auto", "int8", "fp8", "bf16", "f16", "f32"] | None = Field(
        default=None,
        description="What a product's inputs are rounded to, of what the backend has: int8, fp8, "
        "bf16, f16, f32, or auto, the fastest that keeps the outputs close.",
    )
    kv_dtype: str | None = Field(
        default=None, description="KV cache dtype: f32, f16, bf16, int8 or fp8_e4m3."
    )
    page_size: int | None = Field(default=None, ge=1, description="Tokens of a KV page.")
    kv_memory: Annotated[int | None, BeforeValidator(_bytes)] = Field(
        default=None, ge=1, description="Memory for the KV cache: bytes, or such as 2GiB."
    )
    kv_pages: int | None = Field(default=None, ge=2, description="Pages of the KV cache, exactly.")
    prefix_cache: bool = Field(default=True, description="Reuse the KV of prompts seen before.")
    max_length: int | None = Field(default=None, ge=1, description="Most tokens of a sequence.")
    max_sequences: int = Field(
        default=64, ge=1, le=1 << 16, description="Most sequences that run at once."
    )
    step_tokens: int = Field(default=512, ge=1, description="Most tokens computed in a step.")
    policy: Literal["priority", "fcfs", "slo"] = Field(
        default="priority",
        description="Who goes first: priority (equal ones as they come), fcfs, or slo, the "
        "earliest due first token that can still come in time.",
    )
    slo_ttft: float | None = Field(
        default=None, gt=0, le=1e9, description="Milliseconds to the first token, by default."
    )
    slo_tpot: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Milliseconds for each further token, by default; steps are kept below it.",
    )
    deterministic: bool = Field(
        default=False, description="Results bitwise independent of batching, where the backend can."
    )
    chat_template: str | None = Field(
        default=None, description="File with a chat template, in place of the model's."
    )

    host: str = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 is every interface."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0 takes a free one.")
    api_key: tuple[str, ...] = Field(
        default=(),
        description="Key that clients must send; may be repeated. Other users of the machine see "
        "command lines: prefer --api-key-file or the variable POLYSILICON_API_KEY.",
    )
    api_key_file: str | None = Field(default=None, description="File with one API key a line.")
    served_model_name: tuple[str, ...] = Field(
        default=(),
        description="Name of the model for clients, in place of MODEL; may be repeated, the first "
        "stands in answers.",
    )
    max_waiting: int = Field(
        default=256, ge=0, description="Most sequences that wait to run; further ones get a 503."
    )
    max_waiting_kv: float = Field(
        default=4.0,
        gt=0,
        le=1e6,
        description="KV pages that what waits may need, in multiples of the whole KV cache; "
        "further requests get a 503.",
    )
    step_timeout: float = Field(
        default=120.0,
        gt=0,
        le=1e7,
        description="Seconds without a step, while work waits, after which the engine counts as "
        "hung and is restarted.",
    )
    max_restarts: int = Field(
        default=5, ge=0, description="Restarts of the engine within ten minutes, before giving up."
    )
    request_timeout: float = Field(
        default=600.0, gt=0, le=1e7, description="Seconds after which a request is given up."
    )
    drain_timeout: float = Field(
        default=30.0,
        ge=0,
        le=1e7,
        description="Seconds that running requests have to end after SIGTERM.",
    )
    max_body: Annotated[int, BeforeValidator(_bytes)] = Field(
        default=8 << 20, ge=1, description="Most bytes of a request's body, or such as 8MiB."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request.",
    )
    cors_origin: tuple[str, ...] = Field(
        default=(),
        description="Origin of web pages that may call the server, or *; may be repeated.",
    )

    n: int | None = Field(default=None, description="Independent answers.")
    max_tokens: int | None = Field(default=None, description="Most tokens to generate.")
    min_tokens: int | None = Field(default=None, description="Fewest tokens to generate.")
    temperature: float | None = Field(default=None, description="0 is greedy.")
    top_k: int | None = Field(default=None, description="Only the k most likely tokens; 0 is off.")
    top_p: float | None = Field(
        default=None, description="Only tokens that together have probability p."
    )
    min_p: float | None = Field(
        default=None, description="Only tokens of p times the best's probability."
    )
    typical_p: float | None = Field(default=None, description="Locally typical sampling; 1 is off.")
    repetition_penalty: float | None = Field(
        default=None, description="On tokens of prompt and output; 1 is off."
    )
    presence_penalty: float | None = Field(
        default=None, description="On tokens of the output, once."
    )
    frequency_penalty: float | None = Field(
        default=None, description="On tokens of the output, by count."
    )
    seed: int | None = Field(default=None, description="Makes draws repeatable.")
    stop: tuple[str, ...] | None = Field(
        default=None, description="Text that ends the output; may be repeated."
    )
    stop_token_ids: tuple[int, ...] | None = Field(
        default=None, description="Token id that ends the output; may be repeated."
    )
    ignore_eos: bool | None = Field(
        default=None, description="Go on past the end-of-sequence token."
    )
    include_stop_text: bool | None = Field(
        default=None, description="Keep the stop text in the output."
    )
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_pairs)] = Field(
        default=None, description="Added to a token's logit, ID=BIAS; may be repeated."
    )
    bad_words: Annotated[tuple[tuple[int, ...], ...] | None, BeforeValidator(_id_lists)] = Field(
        default=None, description="Token ids never completed in this order, 1,2,3; may be repeated."
    )
    allowed_token_ids: tuple[int, ...] | None = Field(
        default=None, description="Only token ids that may come; may be repeated."
    )
    logprobs: int | None = Field(
        default=None, description="Most likely ids reported per output token."
    )
    prompt_logprobs: int | None = Field(
        default=None, description="Most likely ids reported per prompt token."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the text."
    )

    def sampling(self, **defaults: Any) -> SamplingParams:
        """The sampling parameters: what was said here, over `defaults`, over `SamplingParams`' own.

        Raises RequestError for a value out of range.
        """
        said = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return SamplingParams(**defaults | {k: v for k, v in said.items() if v is not None})


SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__)
"""Names of the fields of `Config` that `sampling` reads: all those of `SamplingParams`."""

SERVER_FIELDS = frozenset(
    {
        "host",
        "port",
        "api_key",
        "api_key_file",
        "served_model_name",
        "max_waiting",
        "max_waiting_kv",
        "step_timeout",
        "max_restarts",
        "request_timeout",
        "drain_timeout",
        "max_body",
        "otlp_endpoint",
        "cors_origin",
    }
)
"""Names of the fields of `Config` that only `polysilicon serve` reads."""


def load_config(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a file (YAML, TOML or JSON, by its suffix) with `flags` over it.

    Raises ConfigError for an unknown name or a value that does not fit, naming where it stands.
    """
    values = _read_file(path) if path is not None else {}
    _check_names(values, path)
    origin = dict.fromkeys(values, str(path))
    values |= flags or {}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_message(error, origin, flags or {})) from None


def _read_file(path: Path) -> dict[str, Any]:
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise ConfigError(f"{path}: name the configuration file .yaml, .toml or .json")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB: it is no configuration file")
    try:
        values = parse(content.decode())
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must hold a mapping of names to values, such as `device: 1`")
    return {key.replace("-", "_"): value for key, value in values.items()}


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".toml": tomllib.loads,
    ".json": json.loads,
}


def _check_names(values: Mapping[str, Any], path: Path | None) -> None:
    for name in values:
        if name not in Config.model_fields:
            hint = nearest(name, Config.model_fields) or ", see `polysilicon run --help`"
            raise ConfigError(f"{path}: unknown name {name!r}{hint}")


def _message(error: ValidationError, origin: Mapping[str, str], flags: Mapping[str, Any]) -> str:
    """The first of pydantic's errors as one line in the user's terms."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    place = f"{origin[name]}: " if name in origin and name not in flags else ""
    spelled = name if place else f"--{name.replace('_', '-')}"
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    return f"{place}{spelled}: {reason}, not {first['input']!r:.80}"
