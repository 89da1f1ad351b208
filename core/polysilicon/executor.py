"""What runs the core's steps: a model definition on a device, or a whole-model engine of a plugin.

The core brings one executor of its own, `native`, which runs model definitions on a `Device`. A
plugin whose library runs whole models (llama.cpp and others) registers an `ExecutorProvider`. The
core keeps what it has for every model: tokenizer, scheduler, pages and prefix cache, sampling.

Pages of a whole-model executor
- There is one KV group, without a window; a page holds tokens `[j * page_size, ...)` of a context,
  always with the same j while it holds them. Page 0 is never written.
- What a step reads of a sequence is what its row of `Batch.page_tables[0]` names. A page in several
  rows is a shared prefix. A row's pages may change from one step to the next without its tokens
  changing: the core has found the same tokens in another page.
- A page is filled from its first slot on, by the steps of one sequence or by a `SlotCopy`. Writing
  its first slot again says that what it held before is not wanted any more. There is no other
  notice that a page, or a sequence, is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from polysilicon.backend import AdapterWeights, PendingTokens, Unavailable
from polysilicon.batch import Batch, Float32, Int32, SamplingBatch

SlotCopies = Sequence[tuple[int, Int32, Int32]]
"""(group, source slots, target slots), int32 `[n]` each; slot = page * page_size + offset."""


class Executor(Protocol):
    """Runs the core's batches. May raise `OutOfMemory` (the core retries with less; nothing has
    changed) and `DeviceLost` (fatal).

    vocab_size: width of its logits. max_sequences: bound on `Batch.sequence_slot`.
    serves_adapters: whether `write_adapter` may be called, and `Batch.adapter_slot` not be 0.
    """

    vocab_size: int
    max_sequences: int
    serves_adapters: bool

    def step(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: SlotCopies,
        previous: PendingTokens | None,
    ) -> PendingTokens:
        """Submit the copies, then the batch, then the sampling of its logits; wait for none."""

    def write_adapter(self, slot: int, weights: AdapterWeights) -> None: ...

    def clear_adapter(self, slot: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class EmbeddingExecutor(Protocol):
    """An `Executor` that gives hidden states too, and so serves embeddings."""

    def embed(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: SlotCopies,
        previous: PendingTokens | None,
    ) -> tuple[PendingTokens, Float32]:
        """As `Executor.step`; waits for the batch's hidden states behind the last norm, float32
        `[T, D]`."""


@runtime_checkable
class LogitsExecutor(Protocol):
    """An `Executor` that gives logits too, from which evals compare whole distributions."""

    def logits(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: SlotCopies,
        previous: PendingTokens | None,
    ) -> tuple[PendingTokens, Float32]:
        """As `Executor.step`; waits for the batch's logits, float32 `[L, V]`."""


class WholeModelExecutor(Executor, Protocol):
    """An executor that brings its model and lays out its own KV cache.

    page_size, pages: of the one KV group; page 0 is counted. max_length: the longest sequence.
    kv_dtype: by which cached KV is named. run_ahead: whether `step` returns before it has ended, so
    that the core gains from submitting the next one early. notes: what the user should know.
    """

    page_size: int
    pages: int
    max_length: int
    kv_dtype: str
    run_ahead: bool
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorSettings:
    """What the user said; None where nothing was, and the executor chooses.

    max_sequences: that run at once. step_tokens: prefill tokens of a step, beside which each
    sequence may have one more. max_length: tokens of a sequence. page_size: tokens. kv_pages: with
    page 0. kv_memory: bytes, not heeded where kv_pages is given. options: by name.
    """

    max_sequences: int
    step_tokens: int
    max_length: int | None = None
    page_size: int | None = None
    kv_pages: int | None = None
    kv_memory: int | None = None
    kv_dtype: str | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@runtime_checkable
class ExecutorProvider(Protocol):
    """What a plugin registers. Importing its module loads no vendor library; `probe` may.

    name: the `--executor` value. contract: the `CONTRACT_VERSION` it was built for. formats: of the
    checkpoints that it takes, as `Checkpoint.format` names them.
    """

    name: str
    contract: tuple[int, int]
    formats: frozenset[str]

    def probe(self) -> Unavailable | None:
        """Why it cannot run here, in words that name the fix; None when it can."""

    def open(self, path: Path, settings: ExecutorSettings) -> WholeModelExecutor:
        """Load the checkpoint at `path`. Raises ValueError, in words that name the mend, for a file
        or a setting that it cannot serve, and OutOfMemory."""
