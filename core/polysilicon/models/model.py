"""What a loaded model offers the engine, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from polysilicon.backend import AdapterPool, AdapterTarget, KVPool, KVSpec
from polysilicon.batch import Batch
from polysilicon.models.config import ModelConfig, kv_groups
from polysilicon.ops import ModelOutputs, Ops


class Model(ABC):
    """A model whose weights are on a device.

    notes: what loading changed and the user should know. nbytes: of the weights on the device.
    Both are set by `load_model`.
    """

    config: ModelConfig
    notes: tuple[str, ...] = ()
    nbytes: int = 0

    def kv_specs(self, page_size: int, kv_dtype: str) -> tuple[KVSpec, ...]:
        """The KV groups to allocate pools for, in the order that `bind` takes them."""
        return kv_groups(self.config, page_size, kv_dtype)

    @abstractmethod
    def adapter_targets(self) -> Mapping[str, AdapterTarget]:
        """The linears that LoRA adapters may change, by the names of their `AdapterRef`s."""

    @abstractmethod
    def bind(self, pools: Sequence[KVPool], adapters: AdapterPool | None = None) -> None:
        """Set the pools that `forward` uses: one a KV group, in order, and that of adapters."""

    @abstractmethod
    def forward(self, ops: Ops, batch: Batch) -> ModelOutputs:
        """One step; a `Forward` for `Device.compile`. Needs `bind` before."""

    @abstractmethod
    def forward_hidden(self, ops: Ops, batch: Batch) -> ModelOutputs:
        """As `forward`, with one hidden state more: that behind the last norm, at the index
        `config.layers`, for every token."""
