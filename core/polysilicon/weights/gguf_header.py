"""A bounded reader of one GGUF file's header: metadata and tensor entries.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is hostile until
checked: every count is held against the bytes left before anything is allocated, every offset
against the file, and each failure is one ModelError that says where and what to do.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError
from polysilicon.weights.files import DOWNLOAD_AGAIN, MappedFile, TensorInfo, shown
from polysilicon.weights.gguf_blocks import REMOVED_TYPES, TENSOR_TYPES, TensorType

MetadataValue = str | bool | int | float | tuple[str, ...] | npt.NDArray[Any]

MAGIC = b"GGUF"

# Far above any real model, low enough that a hostile file costs seconds and megabytes.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_STRINGS = 1 << 22
_MAX_STRING_BYTES = 1 << 27
_MAX_NAME_BYTES = (1 << 16) - 1
_MAX_DIMENSIONS = 4
_MIN_ALIGNMENT = 8
_MAX_ALIGNMENT = 1 << 24
_DEFAULT_ALIGNMENT = 32
_ALIGNMENT_KEY = "general.alignment"

_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_UINT32 = 4
_BOOL = 7
_STRING = 8
_ARRAY = 9
_NUMBERS = {
    number: np.dtype(code)
    for number, code in {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        _UINT32: "<u4",
        5: "<i4",
        6: "<f4",
        _BOOL: "<u1",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor's description, its type, and the byte at which its data starts in the file."""

    info: TensorInfo
    kind: TensorType
    start: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """All that stands before a file's tensor data. size: its bytes, without the padding."""

    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorEntry]
    size: int


def read_header(file: MappedFile) -> Header:
    """Read and check everything but the tensor data. Raises ModelError."""
    return _HeaderReader(file).read()


class _HeaderReader:
    """A cursor over the file. `place` names what is being read, for the error message."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.position = 0
        self.place = "its first bytes"
        self.strings_left = _MAX_STRINGS
        self.string_bytes_left = _MAX_STRING_BYTES

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(
            f"{self.file.path} is no valid GGUF file: in {self.place}, {problem}. {DOWNLOAD_AGAIN}"
        )

    @property
    def left(self) -> int:
        return self.file.size - self.position

    def read(self) -> Header:
        tensor_count, key_count = self._preamble()
        metadata: dict[str, MetadataValue] = {}
        for index in range(key_count):
            self.place = f"metadata entry {index}"
            key = self._name()
            self.place = f"metadata entry {shown(key)}"
            if key in metadata:
                self.fail("the key appears twice")
            kind = self._number(np.dtype("<u4"))
            if key == _ALIGNMENT_KEY and kind != _UINT32:
                self.fail("the value must be an unsigned integer of 32 bits")
            metadata[key] = self._value(kind)
        alignment = self._alignment(metadata)
        tensors: dict[str, TensorEntry] = {}
        for index in range(tensor_count):
            self.place = f"tensor entry {index}"
            name = self._name()
            self.place = f"tensor entry {shown(name)}"
            if name in tensors:
                self.fail("the tensor appears twice")
            tensors[name] = self._tensor(name, alignment)
        size = self.position
        data_start = -(-size // alignment) * alignment
        placed = {
            name: dataclasses.replace(entry, start=data_start + entry.start)
            for name, entry in tensors.items()
        }
        self._check_places(placed)
        return Header(metadata=metadata, tensors=placed, size=size)

    def _preamble(self) -> tuple[int, int]:
        """Magic, version and counts: the number of tensors and of keys."""
        if self.file.size < 4 or self.file.map[:4] != MAGIC:
            raise ModelError(
                f"{self.file.path} is not a GGUF file: it does not begin with 'GGUF'. "
                "Give a .gguf file or a directory of safetensors."
            )
        self.position = 4
        version = self._number(np.dtype("<u4"))
        if version and version & 0xFFFF == 0:
            raise ModelError(
                f"{self.file.path} is a big-endian GGUF file, which is not supported. "
                "Convert it with `gguf-convert-endian FILE little`."
            )
        if version not in (2, 3):
            raise ModelError(
                f"{self.file.path} is GGUF version {version}; versions 2 and 3 are supported. "
                "Convert the model again with a current llama.cpp."
            )
        tensor_count, key_count = (self._number(np.dtype("<u8")) for _ in range(2))
        self._check_count(key_count, _MIN_KEY_BYTES, _MAX_KEYS, "metadata entries")
        self._check_count(tensor_count, _MIN_TENSOR_BYTES, _MAX_TENSORS, "tensors")
        return tensor_count, key_count

    def _check_count(self, count: int, least_bytes: int, limit: int, things: str) -> None:
        if count * least_bytes > self.left:
            self.fail(f"it announces {count} {things}, more than the file can hold")
        if count > limit:
            self.fail(f"it announces {count} {things}; at most {limit} are read")

    def _number(self, dtype: np.dtype[Any]) -> Any:
        """One little-endian number as a Python int or float."""
        return self._numbers(dtype, 1)[0].item()

    def _numbers(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        size = count * dtype.itemsize
        if size > self.left:
            self.fail(f"{size} bytes are announced where the file has {self.left} left")
        start = self.position
        self.position += size
        return self.file.data(start, size).view(dtype)

    def _strings(self, count: int) -> Iterator[str]:
        """`count` strings, each a length of 8 bytes and as many bytes of UTF-8."""
        if count * 8 > self.left:
            self.fail(f"it announces {count} strings, more than the file can hold")
        if count > self.strings_left:
            self.fail(f"the strings of the file exceed {_MAX_STRINGS}")
        self.strings_left -= count
        data, end, position = self.file.map, self.file.size, self.position
        budget = position + count * 8 + self.string_bytes_left
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if end - position < 8:
                self.fail("the file ends within a string's length")
            (length,) = unpack(data, position)
            start = position + 8
            position = start + length
            if position > end:
                self.fail(f"a string of {length} bytes runs past the end of the file")
            if position > budget:
                self.fail(f"the strings of the file exceed {_MAX_STRING_BYTES} bytes")
            try:
                yield str(data[start:position], "utf-8")
            except UnicodeDecodeError:
                self.fail(f"the string at byte {start} is not valid UTF-8")
        self.string_bytes_left -= position - self.position - count * 8
        self.position = position

    def _string(self) -> str:
        (text,) = self._strings(1)
        return text

    def _name(self) -> str:
        if self.left >= 8:
            (length,) = struct.unpack_from("<Q", self.file.map, self.position)
            if length > _MAX_NAME_BYTES:
                self.fail(f"a name of {length} bytes is longer than {_MAX_NAME_BYTES}")
        return self._string()

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            self.fail(f"the value type {kind} is unknown")
        value: bool | int | float = self._number(_NUMBERS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self) -> MetadataValue:
        kind = self._number(np.dtype("<u4"))
        count = self._number(np.dtype("<u8"))
        if kind == _STRING:
            return tuple(self._strings(count))
        if kind == _ARRAY:
            self.fail("the value is an array of arrays, which is not supported")
        if kind not in _NUMBERS:
            self.fail(f"the array's element type {kind} is unknown")
        values = self._numbers(_NUMBERS[kind], count)
        return values != 0 if kind == _BOOL else values

    def _alignment(self, metadata: dict[str, MetadataValue]) -> int:
        alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        assert isinstance(alignment, int)
        self.place = f"metadata entry '{_ALIGNMENT_KEY}'"
        if not _MIN_ALIGNMENT <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self.fail(
                f"{alignment} is not a power of two from {_MIN_ALIGNMENT} to {_MAX_ALIGNMENT}"
            )
        return alignment

    def _tensor(self, name: str, alignment: int) -> TensorEntry:
        """One entry; its `start` counts from the beginning of the tensor data."""
        dimensions = self._number(np.dtype("<u4"))
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self.fail(f"it has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
        shape = tuple(reversed(self._numbers(np.dtype("<u8"), dimensions).tolist()))
        number = self._number(np.dtype("<u4"))
        offset = self._number(np.dtype("<u8"))
        if number in REMOVED_TYPES:
            raise ModelError(
                f"{self.file.path} stores tensor {shown(name)} as {REMOVED_TYPES[number]}, a type "
                "that GGUF has removed. Quantise the model again with a current llama.cpp."
            )
        if number not in TENSOR_TYPES:
            raise ModelError(
                f"{self.file.path} stores tensor {shown(name)} as type {number}, which is unknown. "
                "Use a file of another quantisation, or a newer polysilicon."
            )
        kind = TENSOR_TYPES[number]
        if 0 in shape:
            self.fail("one of its dimensions is zero")
        if shape[-1] % kind.elements:
            self.fail(f"rows of {shape[-1]} are no multiple of {kind.name}'s {kind.elements}")
        if offset % alignment:
            self.fail(f"its offset {offset} is no multiple of the alignment {alignment}")
        nbytes = math.prod(shape) // kind.elements * kind.size
        info = TensorInfo(name=name, type=kind.name, shape=shape, nbytes=nbytes)
        return TensorEntry(info=info, kind=kind, start=offset)

    def _check_places(self, tensors: dict[str, TensorEntry]) -> None:
        """Every tensor's bytes lie inside the file and belong to it alone."""
        end = 0
        for entry in sorted(tensors.values(), key=lambda entry: entry.start):
            self.place = f"tensor entry {shown(entry.info.name)}"
            if entry.start + entry.info.nbytes > self.file.size:
                self.fail(
                    f"its {entry.info.nbytes} bytes at byte {entry.start} lie outside the file of "
                    f"{self.file.size} bytes"
                )
            if entry.start < end:
                self.fail("its bytes overlap another tensor's")
            end = entry.start + entry.info.nbytes
