"""Writing a GGUF file, version 3.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError
from polysilicon.weights.gguf_blocks import TENSOR_TYPES
from polysilicon.weights.gguf_header import MAGIC, MetadataValue

_ALIGNMENT = 32
_NUMBERS = {
    np.dtype(np.uint8): 0,
    np.dtype(np.int8): 1,
    np.dtype(np.uint16): 2,
    np.dtype(np.int16): 3,
    np.dtype(np.uint32): 4,
    np.dtype(np.int32): 5,
    np.dtype(np.float32): 6,
    np.dtype(np.bool_): 7,
    np.dtype(np.uint64): 10,
    np.dtype(np.int64): 11,
    np.dtype(np.float64): 12,
}
_STRING, _ARRAY = 8, 9
_TYPES = {kind.name: (number, kind) for number, kind in TENSOR_TYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One tensor of a file to be written. shape: logical, outputs first. type: by ggml's name."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        _, kind = _TYPES[self.type]
        return math.prod(self.shape) // kind.elements * kind.size


class GGUFWriter:
    """Writes the header at once, and then the tensors in the order that it names them."""

    def __init__(
        self, path: Path, metadata: Mapping[str, MetadataValue], tensors: Sequence[GGUFTensor]
    ) -> None:
        self._file = path.open("wb")
        self._left = list(tensors)
        head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
        head += [_text(key) + _value(value) for key, value in metadata.items()]
        start = 0
        for tensor in tensors:
            shape = tensor.shape[::-1]
            number, _ = _TYPES[tensor.type]
            head.append(_text(tensor.name) + struct.pack("<I", len(shape)))
            head.append(struct.pack(f"<{len(shape)}QIQ", *shape, number, start))
            start += _aligned(tensor.nbytes)
        header = b"".join(head)
        self._file.write(header.ljust(_aligned(len(header)), b"\0"))

    def write(self, name: str, data: npt.NDArray[np.uint8]) -> None:
        """The bytes of the next tensor, which has this name."""
        tensor = self._left.pop(0)
        assert (tensor.name, tensor.nbytes) == (name, data.size)
        self._file.write(np.ascontiguousarray(data).data)
        self._file.write(bytes(_aligned(data.size) - data.size))

    def close(self) -> None:
        self._file.close()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(value: str) -> bytes:
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise ModelError(
            f"the text {value!r:.60} holds half of a surrogate pair, which GGUF cannot: correct it "
            "in the tokenizer and configuration of the model"
        ) from None
    return struct.pack("<Q", len(data)) + data


def _value(value: MetadataValue) -> bytes:
    """A value behind its type. Integers are u32 where they fit, as llama.cpp's own keys are."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, tuple):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return head + b"".join(map(_text, value))
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        kind = _NUMBERS[np.dtype(value.dtype.newbyteorder("="))]
        return struct.pack("<IIQ", _ARRAY, kind, value.size) + little.tobytes()
    scalar: np.generic
    if isinstance(value, bool):
        scalar = np.bool_(value)
    elif isinstance(value, float):
        scalar = np.float32(value)
    else:
        fitting = (np.uint32, np.int32, np.int64, np.uint64)
        kinds = [k for k in fitting if np.iinfo(k).min <= value <= np.iinfo(k).max]
        scalar = kinds[0](value)
    return struct.pack("<I", _NUMBERS[scalar.dtype]) + scalar.tobytes()
