"""The core's steps through `llama_decode`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polysilicon.backend import (
    AdapterWeights,
    Batch,
    DeviceLost,
    PendingTokens,
    SampledTokens,
    SamplingBatch,
    sample_on_host,
)
from polysilicon_llamacpp.library import Context, Int32
from polysilicon_llamacpp.sequences import PageSequences


class Sampled:
    """Tokens that are there already: llama.cpp runs a step when it is told to."""

    def __init__(self, tokens: SampledTokens) -> None:
        self._tokens = tokens

    def result(self) -> SampledTokens:
        return self._tokens


class LlamaCppExecutor:
    """A `WholeModelExecutor` around one llama.cpp context."""

    serves_adapters = False
    run_ahead = False

    def __init__(
        self,
        context: Context,
        *,
        max_sequences: int,
        page_size: int,
        pages: int,
        max_length: int,
        kv_dtype: str,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.vocab_size = context.model.vocab_size
        self.max_sequences = max_sequences
        self.page_size = page_size
        self.pages = pages
        self.max_length = max_length
        self.kv_dtype = kv_dtype
        self.notes = notes
        self._context = context
        self._sequences = PageSequences(
            context, rows=max_sequences, pages=pages, page_size=page_size
        )

    def step(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: Sequence[tuple[int, Int32, Int32]],
        previous: PendingTokens | None,
    ) -> PendingTokens:
        for _, source, target in copies:
            self._copy(source, target)
        (tables,) = (table.tolist() for table in batch.page_tables)
        counts = np.diff(batch.query_start)
        shares = [
            (row, table, stop - count, stop)
            for row, table, count, stop in zip(
                batch.sequence_slot.tolist(),
                tables,
                counts.tolist(),
                batch.context_len.tolist(),
                strict=True,
            )
        ]
        for row, table, start, _ in shares:
            self._sequences.read(row, table, start)
            self._check_window(row, start)
        for _, table, start, stop in shares:
            self._sequences.claim(table, start, stop)
        rows, places = np.unique(batch.logit_rows, return_inverse=True)
        logits = self._context.decode(
            self._tokens(batch, previous),
            batch.positions,
            np.repeat(batch.sequence_slot, counts),
            rows,
        )
        for row, table, start, stop in shares:
            self._sequences.written(row, table, start, stop)
        if not np.array_equal(places, np.arange(len(rows))):
            logits = logits[places]
        return Sampled(sample_on_host(logits, sampling))

    def write_adapter(self, slot: int, weights: AdapterWeights) -> None:
        raise ValueError("llama.cpp runs one adapter for all sequences or none")

    def clear_adapter(self, slot: int) -> None:
        raise ValueError("no adapter is loaded")

    def close(self) -> None:
        self._context.close()
        self._context.model.close()

    def _copy(self, source: Int32, target: Int32) -> None:
        first, at = int(source[0]), int(target[0])
        assert first % self.page_size == at % self.page_size == 0
        assert len(source) <= self.page_size
        self._sequences.copy(first // self.page_size, at // self.page_size, len(source))

    def _check_window(self, row: int, length: int) -> None:
        """llama.cpp may give a cell away that fell behind its sequences' sliding window, and then
        this sequence lacks what another one may still see."""
        if length and self._context.model.window and self._context.first_position(row):
            raise DeviceLost("llama.cpp has given KV cells of a cached prefix away")

    @staticmethod
    def _tokens(batch: Batch, previous: PendingTokens | None) -> Int32:
        sampled = batch.token_source >= 0
        if not sampled.any():
            return batch.tokens
        assert previous is not None
        known = previous.result().tokens
        return np.where(sampled, known[np.where(sampled, batch.token_source, 0)], batch.tokens)
