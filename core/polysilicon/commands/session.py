"""What the generating commands share: a loaded model with its notes on stderr, and timings."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from polysilicon import progress
from polysilicon.catalogue import resolve_model
from polysilicon.config import SAMPLING_FIELDS, SERVER_FIELDS, Config
from polysilicon.engine.loading import Loaded, load
from polysilicon.errors import RequestError
from polysilicon.generation import command_line_defaults
from polysilicon.request import FinishReason, Request, RequestOutput, SamplingParams

ENGINE_FIELDS = (
    frozenset(Config.model_fields) - SAMPLING_FIELDS - SERVER_FIELDS - {"model", "chat_template"}
)
"""Fields of `Config` that say how the engine runs, as flags of every generating command."""


@contextmanager
def session(config: Config, model: str | None) -> Iterator[Loaded]:
    """The model of the command line, or of the configuration file, or the default, loaded; notes
    go to stderr."""
    path = resolve_model(model or config.model, progress=progress.bar)
    loaded = load(config, path, progress=progress.bar)
    try:
        for note in loaded.notes:
            print(f"polysilicon: {note}", file=sys.stderr)
        yield loaded
    finally:
        loaded.client.close()
        loaded.checkpoint.close()


def sampling(config: Config, loaded: Loaded, *, max_tokens: int | None) -> SamplingParams:
    """Sampling parameters of the command line over the model's defaults, for one answer: a
    configuration file's `n` is for `generate`."""
    params = config.sampling(
        **{"max_tokens": max_tokens} | command_line_defaults(loaded.checkpoint)
    )
    return dataclasses.replace(params, n=1)


def stream(loaded: Loaded, request: Request, *, stats: bool) -> str:
    """Write a request's text to stdout as it comes, and with `stats` its times to stderr; returns
    the text. Raises RequestError when the engine fails."""
    timing = Timing()
    text = ""
    for output in loaded.client.generate([request]):
        timing.take(output)
        text += output.text
        sys.stdout.write(output.text)
        sys.stdout.flush()
        if output.finish_reason is FinishReason.ERROR:
            raise RequestError(output.error or "the engine failed")
    sys.stdout.write("\n")
    sys.stdout.flush()
    if stats:
        print(timing.line(len(request.prompt)), file=sys.stderr)
    return text


@dataclasses.dataclass
class Timing:
    """Times of one request, in seconds since it was submitted."""

    began: float = dataclasses.field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    cached: int = 0

    def take(self, output: RequestOutput) -> None:
        if output.ids:
            self.last = time.perf_counter() - self.began
            self.first = self.first if self.first is not None else self.last
            self.tokens += len(output.ids)
        self.cached = max(self.cached, output.num_cached_tokens)

    def line(self, prompt_tokens: int) -> str:
        """TTFT, TPOT and rates for people to read."""
        if self.first is None or self.last is None:
            return "no tokens"
        parts = [
            f"prompt {prompt_tokens} tokens ({self.cached} cached)",
            f"TTFT {self.first * 1e3:.0f} ms",
        ]
        if self.tokens > 1:
            per_token = (self.last - self.first) / (self.tokens - 1)
            parts.append(f"TPOT {per_token * 1e3:.1f} ms")
            parts.append(f"decode {1 / max(per_token, 1e-9):.1f} tokens/s")
        parts.append(f"{self.tokens} tokens in {self.last:.2f} s")
        return ", ".join(parts)
