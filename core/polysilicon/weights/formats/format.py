"""What a reader of quantised safetensors checkpoints supplies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from polysilicon.weights.encodings import Weight
from polysilicon.weights.files import TensorInfo
from polysilicon.weights.safetensors import SafetensorsDirectory


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LogicalTensor:
    """One tensor of the model, whatever stored tensors it is made of.

    info: name and shape as the unquantised model has them; type names the format and what it holds
    (`gptq:4`); nbytes is what all the stored tensors that it is made of take.
    read: the values in a canonical encoding. Raises ModelError where they cannot be used.
    """

    info: TensorInfo
    read: Callable[[], Weight]


@runtime_checkable
class CheckpointFormat(Protocol):
    """A way of storing quantised weights in a directory of safetensors.

    name: the value of `--quantization`, unique: `[a-z][a-z0-9_-]*`, at most 32 characters.
    encodings: what it reads, by `TensorInfo.type`, each with the encoding that such a tensor comes
    in, of a usual group (`{"gptq:4": "affine:4/128"}`; `row` for groups of whole rows).
    """

    name: str
    encodings: Mapping[str, str]

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        """Whether config and tensors' names and types are this format's. Never raises.

        At most one format may recognise a checkpoint.
        """

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        """The model's tensors by their logical names, those that are not quantised included.

        It is called too where `recognizes` says no, because the user asked for the format. Raises
        ModelError where config and tensors are not this format's, where what they say is not
        supported, and for types and shapes that do not fit together; values are checked by
        `LogicalTensor.read`.
        """
