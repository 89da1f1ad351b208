"""What a model family tells the loader: its names, how its parameters are read, how it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from polysilicon.backend import Handle
from polysilicon.models.config import ModelConfig
from polysilicon.models.model import Model
from polysilicon.models.names import TensorNames
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Float32
from polysilicon.weights.fields import Fields


class Weights(Protocol):
    """The checkpoint's tensors, placed on the device by the family's own names for them."""

    def matrix(self, *keys: str, parts: Sequence[int] | None = None) -> Handle:
        """Place matrices `[N_i, K]`, fused into one product. parts: into how many parts of as many
        rows each is cut; None for one."""

    def stack(self, *keys: str, feeds: str | None = None) -> Handle:
        """Place stacks `[E, N_i, K]` of expert matrices, fused; a matrix is a stack of one.

        feeds: the stack whose inputs are element-wise functions of these outputs, and of nothing
        else: both may then be placed in another order than the checkpoint has.
        """

    def vector(self, *keys: str, offset: float = 0.0) -> Handle:
        """Place vectors `[N_i]`, concatenated, with `offset` added to every element."""

    def vectors(self, key: str) -> Sequence[Handle]:
        """Place the rows of a matrix `[M, N]` as M vectors."""

    def expert_bias(self, *keys: str) -> Handle:
        """Place biases `[E, N_i]` of experts as one matrix `[E, sum of N_i]`."""

    def computed(self, compute: Callable[..., Sequence[Float32]], *keys: str) -> Handle:
        """Place matrices that `compute` makes of the values of keys, fused: float32 where one of
        them is stored so, else in 16 bits."""

    def kv_scales(self, key: str, value: str, *, heads: int) -> Mapping[str, Any]:
        """Keywords that tell `Ops.attention` the `kv_scales` of a layer whose keys and values come
        from these matrices. None where KV is not fp8, the checkpoint was not calibrated for it, or
        the device, of an earlier contract, does not know the keyword."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model family.

    name: in `ModelConfig.architecture` and in messages.
    hf_names: of `architectures` in config.json. hf_types: `model_type`, asked only where that is
    missing. gguf_names: `general.architecture`.
    read_hf, read_gguf: parameters to a config, for a context of `max_length` tokens (None: as many
    as the model was trained for). They raise ModelError naming the field.
    hf_tensors: the spellings that occur; the one that knows most tensors of the file is taken.
    shapes: the tensors that a config calls for, by the family's own keys.
    build: the model, from placed weights.
    """

    name: str
    hf_names: tuple[str, ...]
    hf_types: tuple[str, ...]
    gguf_names: tuple[str, ...]
    read_hf: Callable[[Fields, int | None], ModelConfig]
    read_gguf: Callable[[Fields, Checkpoint, int | None], ModelConfig]
    hf_tensors: tuple[TensorNames, ...]
    gguf_tensors: TensorNames
    shapes: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]
    build: Callable[[ModelConfig, Weights], Model]
