"""The core's own executor: a model definition on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polysilicon.backend import (
    AdapterPool,
    AdapterSpec,
    AdapterWeights,
    Batch,
    Device,
    KVPool,
    KVSpec,
    PendingTokens,
    Program,
    SamplingBatch,
)
from polysilicon.batch import Float32
from polysilicon.executor import SlotCopies
from polysilicon.models.model import Model


class ModelExecutor:
    """A model definition compiled for a device, with its KV pools and adapter pool."""

    def __init__(
        self,
        *,
        device: Device,
        model: Model,
        specs: Sequence[KVSpec],
        pages: Sequence[int],
        max_sequences: int,
        max_adapters: int = 0,
        max_adapter_rank: int = 0,
    ) -> None:
        self.vocab_size = model.config.vocab_size
        self.max_sequences = max_sequences
        self.serves_adapters = device.capabilities.adapters > 0
        self.device = device
        self.model = model
        self.pools: tuple[KVPool, ...] = tuple(
            device.kv_pool(spec, count) for spec, count in zip(specs, pages, strict=True)
        )
        self.adapters: AdapterPool | None = None
        if max_adapters:
            spec = AdapterSpec(max_rank=max_adapter_rank, targets=model.adapter_targets())
            self.adapters = device.adapter_pool(spec, max_adapters + 1)
        model.bind(self.pools, self.adapters)
        self.program = device.compile(model.forward)
        self._hidden_program: Program | None = None

    def step(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: SlotCopies,
        previous: PendingTokens | None,
    ) -> PendingTokens:
        self._copy(copies)
        return self.device.sample(self.program(batch, previous), sampling)

    def logits(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: SlotCopies,
        previous: PendingTokens | None,
    ) -> tuple[PendingTokens, Float32]:
        """As `step`; waits for the batch's logits, float32 `[L, V]`."""
        self._copy(copies)
        pending = self.program(batch, previous)
        tokens = self.device.sample(pending, sampling)
        return tokens, pending.result().logits

    def embed(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: SlotCopies,
        previous: PendingTokens | None,
    ) -> tuple[PendingTokens, Float32]:
        """As `step`; waits for the hidden states behind the last norm, float32 `[T, D]`."""
        layer = self.model.config.layers
        if self._hidden_program is None:
            self._hidden_program = self.device.compile(self.model.forward_hidden, hidden=[layer])
        self._copy(copies)
        pending = self._hidden_program(batch, previous)
        tokens = self.device.sample(pending, sampling)
        return tokens, pending.result().hidden[layer]

    def _copy(self, copies: SlotCopies) -> None:
        for group, source, target in copies:
            self.pools[group].copy(
                np.ascontiguousarray(source, np.int32), np.ascontiguousarray(target, np.int32)
            )

    def write_adapter(self, slot: int, weights: AdapterWeights) -> None:
        assert self.adapters is not None
        self.adapters.write(slot, weights)

    def clear_adapter(self, slot: int) -> None:
        assert self.adapters is not None
        self.adapters.clear(slot)

    def close(self) -> None:
        self.device.close()
