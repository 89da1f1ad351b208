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
    SamplingBatch,
)
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

    def step(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: SlotCopies,
        previous: PendingTokens | None,
    ) -> PendingTokens:
        for group, source, target in copies:
            self.pools[group].copy(
                np.ascontiguousarray(source, np.int32), np.ascontiguousarray(target, np.int32)
            )
        return self.device.sample(self.program(batch, previous), sampling)

    def write_adapter(self, slot: int, weights: AdapterWeights) -> None:
        assert self.adapters is not None
        self.adapters.write(slot, weights)

    def clear_adapter(self, slot: int) -> None:
        assert self.adapters is not None
        self.adapters.clear(slot)

    def close(self) -> None:
        self.device.close()
