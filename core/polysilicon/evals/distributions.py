"""The whole distribution that a model gives to each token of a window.

`Request.params.prompt_logprobs` reports a few of the likeliest ids, and a divergence needs them
all. So the engine's executor is listened to: one window at a time runs through the engine, as any
prompt does, and the logits of its steps are taken on the way. No more than a step's are held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from polysilicon.backend import AdapterWeights, PendingTokens, SamplingBatch
from polysilicon.batch import Batch, Float32
from polysilicon.engine.loading import Loaded
from polysilicon.errors import RequestError
from polysilicon.evals.windows import Window
from polysilicon.executor import Executor, LogitsExecutor, SlotCopies
from polysilicon.request import Request, SamplingParams

_SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0)


class Distributions:
    """Runs windows through a loaded model, which serves nothing else meanwhile."""

    def __init__(self, loaded: Loaded) -> None:
        self.vocab_size = loaded.engine.executor.vocab_size
        self._client = loaded.client
        self._listener = _Listener(loaded.engine.executor)
        loaded.engine.executor = self._listener
        self._serial = 0

    def of(self, window: Window) -> Iterator[Float32]:
        """Logits of the window's scored tokens, up to a constant for each: float32 `[n, V]` piece
        by piece, one row a token, in order. Raises RequestError when the engine fails."""
        self._serial += 1
        self._client.submit(
            Request(id=f"window {self._serial}", prompt=window.tokens, params=_SCORING)
        )
        # The row that scores token i stands before it, so that the first is that of token 1.
        unwanted = window.first - 1
        missing = len(window.scored)
        while self._client.has_work:
            for output in self._client.poll():
                if output.error is not None:
                    raise RequestError(output.error)
            for logits in self._listener.take():
                wanted = logits[unwanted:]
                unwanted = max(0, unwanted - len(logits))
                if len(wanted):
                    missing -= len(wanted)
                    yield wanted
        assert missing == 0


class _Listener:
    """An executor that passes everything on, and keeps the logits that score a prompt's tokens."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._taken: list[Float32] = []
        self.vocab_size = executor.vocab_size
        self.max_sequences = executor.max_sequences
        self.serves_adapters = executor.serves_adapters

    def take(self) -> list[Float32]:
        """What came since the last call, in order."""
        taken, self._taken = self._taken, []
        return taken

    def step(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: SlotCopies,
        previous: PendingTokens | None,
    ) -> PendingTokens:
        if sampling.targets is None:
            return self._executor.step(batch, sampling, copies, previous)
        scored = sampling.targets >= 0
        if isinstance(self._executor, LogitsExecutor):
            tokens, logits = self._executor.logits(batch, sampling, copies, previous)
            self._taken.append(logits if scored.all() else logits[scored])
            return tokens
        # A whole-model executor keeps its logits: all log-probabilities tell as much.
        everything = dataclasses.replace(sampling, top_logprobs=self.vocab_size)
        tokens = self._executor.step(batch, everything, copies, previous)
        result = tokens.result()
        assert result.top_ids is not None
        assert result.top_logprobs is not None
        self._taken.append(_by_id(result.top_ids[scored], result.top_logprobs[scored]))
        return tokens

    def write_adapter(self, slot: int, weights: AdapterWeights) -> None:
        self._executor.write_adapter(slot, weights)

    def clear_adapter(self, slot: int) -> None:
        self._executor.clear_adapter(slot)

    def close(self) -> None:
        self._executor.close()


def _by_id(ids: npt.NDArray[np.int32], values: Float32) -> Float32:
    """Rows of values in the order of their ids."""
    ordered = np.empty_like(values)
    np.put_along_axis(ordered, ids.astype(np.int64), values, axis=1)
    return ordered
