"""A writer of small GGUF files that may say anything, true or hostile."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

UINT32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def tensor(name: str | bytes, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    """One entry; `dimensions` in ggml's order, the row length first."""
    return text(name) + struct.pack(
        f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset
    )


def gguf_file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


class GGUFBuilder:
    """The functions above, and entries of single values."""

    text = staticmethod(text)
    key = staticmethod(key)
    array = staticmethod(array)
    tensor = staticmethod(tensor)
    file: Callable[..., bytes] = staticmethod(gguf_file)

    @staticmethod
    def number(name: str, value: float, kind: str = "I") -> bytes:
        code = {"B": 0, "H": 2, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10}[kind]
        return key(name, code, struct.pack(f"<{kind}", value))

    @staticmethod
    def string(name: str, value: str | bytes) -> bytes:
        return key(name, STRING, text(value))

    @staticmethod
    def strings(name: str, values: Sequence[str]) -> bytes:
        return key(name, ARRAY, array(STRING, len(values), b"".join(map(text, values))))

    @staticmethod
    def numbers(name: str, kind: int, values: Any) -> bytes:
        return key(name, ARRAY, array(kind, len(values), values.tobytes()))
