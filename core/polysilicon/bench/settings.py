"""What a load run is told: the server, the workload and the arrivals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from polysilicon.bench.arrivals import RampUp
from polysilicon.bench.metrics import Goodput
from polysilicon.bench.workloads import Item
from polysilicon.errors import ConfigError

Endpoint = Literal["completions", "chat"]
PromptForm = Literal["auto", "ids", "text"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run. rates: requests per second, one run each; infinite: all at once; None: at the
    workload's own times, which it then must have. items: sent in order. workload: what they are, in
    few words. timeout: seconds of a request."""

    url: str
    model: str | None
    endpoint: Endpoint
    prompt_form: PromptForm
    vocab_size: int | None
    headers: Mapping[str, str]
    extra: Mapping[str, Any]
    timeout: float
    workload: str
    items: Sequence[Item]
    rates: Sequence[float | None]
    burstiness: float
    ramp_up: RampUp | None
    max_concurrency: int | None
    warm_ups: int
    goodput: Goodput | None
    seed: int


def normalise(url: str) -> str:
    """The address without path. Raises ConfigError for what is no HTTP address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    path = parts.path.rstrip("/").removesuffix("/v1")
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"--url must be such as http://127.0.0.1:8000, not {url!r}")
    return f"{parts.scheme}://{parts.netloc}{path}"
