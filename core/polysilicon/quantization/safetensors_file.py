"""Writing safetensors: one file, or shards with an index.

The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from polysilicon.weights.encodings import Array
from polysilicon.weights.safetensors import INDEX_NAME, SINGLE_NAME

_NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint32): "U32",
}
_SHARD_BYTES = 4 << 30


class SafetensorsWriter:
    """Collects tensors and writes them into `directory` in shards of at most 4 GiB (one tensor of
    more has a shard of its own), so that memory stays bounded.

    metadata: texts for the files' `__metadata__`.
    """

    def __init__(
        self, directory: Path, metadata: dict[str, str], *, shard_bytes: int = _SHARD_BYTES
    ) -> None:
        self._directory = directory
        self._metadata = metadata
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Array] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, name: str, array: Array) -> None:
        if self._pending and self._pending_bytes + array.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = np.ascontiguousarray(array)
        self._pending_bytes += array.nbytes
        self._total += array.nbytes

    def close(self) -> None:
        """Write what is left and give the files their final names."""
        self._flush()
        if len(self._shards) == 1:
            self._shards[0][0].rename(self._directory / SINGLE_NAME)
            return
        places: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, start=1):
            name = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            path.rename(self._directory / name)
            places |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self._total}, "weight_map": places}
        (self._directory / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _flush(self) -> None:
        # Wide dtypes first, so that every tensor is aligned to its own.
        pending = sorted(self._pending.items(), key=lambda item: -item[1].dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": self._metadata}
        start = 0
        for name, array in pending:
            header[name] = {
                "dtype": _NAMES[array.dtype],
                "shape": list(array.shape),
                "data_offsets": [start, start + array.nbytes],
            }
            start += array.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = self._directory / f"shard-{len(self._shards)}.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, array in pending:
                file.write(array.reshape(-1).view(np.uint8).data)
        self._shards.append((path, [name for name, _ in pending]))
        self._pending, self._pending_bytes = {}, 0
