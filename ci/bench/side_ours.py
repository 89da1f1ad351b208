"""polysilicon's side of a comparison: what `polysilicon bench throughput` measures, through the
engine that serves, sampling included.
"""

from __future__ import annotations

from pathlib import Path

from sides import serve

from polysilicon.bench.throughput import Load, measure
from polysilicon.config import Config
from polysilicon.engine.loading import load


class Ours:
    def __init__(self, model: str, backend: str, options: dict[str, str], streams: int) -> None:
        config = Config(
            model=None, backend=backend, backend_option=options, max_sequences=max(streams, 1)
        )
        self._loaded = load(config, Path(model))

    def context(self) -> int:
        return self._loaded.engine.max_length

    def notes(self) -> tuple[str, ...]:
        return self._loaded.notes

    def rate(self, work: str, tokens: int, streams: int, output: int, seed: int) -> float:
        own = 1 if work == "shared" else 0
        load = Load(
            prompt_tokens=tokens + own,
            output_tokens=2 if work == "prefill" else output,
            batch=streams,
            shared_prefix=tokens if own else 0,
        )
        result = measure(self._loaded.client, self._loaded.engine, load, repeats=1, seed=seed)
        return result.prefill_tokens_per_s if work == "prefill" else result.decode_tokens_per_s


if __name__ == "__main__":
    serve(Ours)
