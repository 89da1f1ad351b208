"""Safetensors checkpoints: a directory as Hugging Face writes it.

The format: https://github.com/huggingface/safetensors#format. A file is a little-endian uint64, a
JSON header of that many bytes, and the tensors' bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeGuard

import ml_dtypes
import numpy as np

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Array, Dense, Weight
from polysilicon.weights.files import (
    DOWNLOAD_AGAIN,
    MappedFile,
    TensorInfo,
    directory_names,
    header_fingerprint,
    shown,
)

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"

# An index of 140,000 tensors, as the largest mixtures of experts have, takes about 14 MB.
_MAX_JSON_BYTES = 1 << 25
_MAX_DIMENSIONS = 8
_SHARD_NAME = re.compile(r"[^/\\:\0]+\.safetensors", re.DOTALL)
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt"})

_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "BOOL": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "C64": np.dtype("<c8"), "BOOL": np.dtype(np.uint8),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}  # fmt: skip
TENSOR_TYPES = tuple(_BITS)
SUPPORTED_TYPES = ("F32", "F16", "BF16")
"""Those of weights that are not quantised."""

SIDECAR_NAMES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files beside config.json in which some tools say how they quantised."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    info: TensorInfo
    file: MappedFile
    start: int


class SafetensorsDirectory:
    """An open directory with `config.json` and `model.safetensors` or its shards and their index.

    config, generation_config: the parsed JSON objects; the second is empty when there is no file.
    sidecars: the parsed JSON objects of those of `SIDECAR_NAMES` that there are, by name.
    metadata: texts that the writer left in the headers' `__metadata__`.
    tensors: as they are stored, by the files' own names, those of quantised weights included
    (`model.layers.0.self_attn.q_proj.qweight`).

    Files are mapped, not read: a weight is a view of the map and stays valid after `close`; a
    file's map goes with the last of them.
    """

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        """Raises ModelError when a file is missing or malformed."""
        self.path = path
        if not os.path.isdir(path):
            raise ModelError(f"{path} is not a directory. Give the one that holds {CONFIG_NAME}.")
        config = _read_json(path / CONFIG_NAME)
        self.config = parse_object(path / CONFIG_NAME, config)
        self.generation_config: dict[str, Any] = {}
        generation_path = path / GENERATION_CONFIG_NAME
        if os.path.exists(generation_path):
            self.generation_config = parse_object(generation_path, _read_json(generation_path))
        self._headers: list[bytes] = [config]
        self.sidecars: dict[str, dict[str, Any]] = {}
        for name in SIDECAR_NAMES:
            if os.path.exists(path / name):
                self._headers.append(_read_json(path / name))
                self.sidecars[name] = parse_object(path / name, self._headers[-1])
        self.metadata: dict[str, str] = {}
        self._entries = self._open_shards()
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: entry.info for name, entry in self._entries.items()}
        )
        self._closed = False

    def _open_shards(self) -> dict[str, _Entry]:
        if os.path.exists(self.path / SINGLE_NAME):
            return self._open_shard(self.path / SINGLE_NAME)
        if not os.path.exists(self.path / INDEX_NAME):
            raise ModelError(_why_no_weights(self.path))
        places = _read_index(self.path / INDEX_NAME)
        names = sorted(set(places.values()))
        missing = [name for name in names if not os.path.exists(self.path / name)]
        if missing:
            raise ModelError(
                f"{self.path} lacks {len(missing)} of the {len(names)} files that its index names: "
                f"{', '.join(map(shown, missing[:5]))}. Download them."
            )
        shards = {name: self._open_shard(self.path / name) for name in names}
        entries = {}
        for tensor, name in places.items():
            if tensor not in shards[name]:
                raise ModelError(
                    f"{self.path / INDEX_NAME} says that {shown(name)} holds tensor "
                    f"{shown(tensor)}, but it does not. Download both again, from one source."
                )
            entries[tensor] = shards[name][tensor]
        return entries

    def _open_shard(self, path: Path) -> dict[str, _Entry]:
        file = MappedFile(path)
        length = int.from_bytes(file.map[:8], "little")
        if file.size < 8 or length > file.size - 8:
            raise ModelError(
                f"{path} is no valid safetensors file: a header of {length} bytes is announced, "
                f"the file has {file.size}. {DOWNLOAD_AGAIN}"
            )
        if length > _MAX_JSON_BYTES:
            raise ModelError(
                f"{path} has a header of {length} bytes; at most {_MAX_JSON_BYTES} are read. "
                "Save the model in shards."
            )
        header = file.map[8 : 8 + length]
        self._headers.append(file.size.to_bytes(8, "little") + header)
        values = parse_object(path, header, unique_keys=True)
        metadata = values.pop("__metadata__", None)
        if isinstance(metadata, dict):
            self.metadata |= {k: v for k, v in metadata.items() if isinstance(v, str)}
        entries = {
            name: _read_entry(file, 8 + length, name, value) for name, value in values.items()
        }
        _check_overlaps(path, entries.values())
        return entries

    def weight(self, name: str) -> Weight:
        """One tensor as `Dense`, a read-only view of its file.

        Raises ModelError for an unknown name and for a type other than F32, F16 and BF16.
        """
        info = self._entry(name).info
        if info.type not in SUPPORTED_TYPES or 0 in info.shape:
            raise ModelError(
                f"{self.path} stores tensor {shown(name)} as {info.type} of shape "
                f"{list(info.shape)}, which is not supported as a weight. "
                "Use a checkpoint with F32, F16 or BF16 weights."
            )
        return Dense(array=self.array(name))

    def array(self, name: str) -> Array:
        """One tensor as it is stored, a read-only view of its file, in its own dtype.

        The dtype is NumPy's or ml_dtypes' of that name; BOOL comes as uint8, and F4 as uint8
        `[..., K / 2]`, lower half first. Raises ModelError for an unknown name and for what NumPy
        cannot hold (F6, and F4 of an odd last axis).
        """
        entry = self._entry(name)
        shape, data = entry.info.shape, entry.file.data(entry.start, entry.info.nbytes)
        if entry.info.type == "F4" and shape and shape[-1] % 2 == 0:
            return data.reshape(*shape[:-1], shape[-1] // 2)
        if entry.info.type not in _DTYPES:
            raise ModelError(
                f"{self.path} stores tensor {shown(name)} as {entry.info.type} of shape "
                f"{list(shape)}, which is not supported. Use another checkpoint of this model."
            )
        array: Array = data.view(_DTYPES[entry.info.type])
        if not array.flags.aligned:
            # Headers need not be padded; kernels want aligned numbers.
            array = array.copy()
            array.flags.writeable = False
        return array.reshape(shape)

    def _entry(self, name: str) -> _Entry:
        self.check_open()
        if name not in self._entries:
            raise ModelError(
                f"{self.path} has no tensor {shown(name)}. Use a checkpoint of the whole model."
            )
        return self._entries[name]

    def check_open(self) -> None:
        """Raises ValueError after `close`."""
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def fingerprint(self) -> str:
        """The model's identity: hex SHA-256 over config, headers, file sizes and tensor samples.

        Cheap (4 KiB of each tensor are read) and the same for every copy of the directory. Two
        checkpoints whose tensors differ only outside the samples would share it.
        """
        self.check_open()
        return header_fingerprint(
            self._headers,
            (entry.file.data(entry.start, entry.info.nbytes) for entry in self._entries.values()),
        )

    def close(self) -> None:
        """Let go of the files. Weights already handed out stay valid."""
        self._closed = True
        self._entries.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file such as `config.json` holds. Raises ModelError."""
    return parse_object(path, _read_json(path))


def _read_json(path: Path) -> bytes:
    file = MappedFile(path)
    if file.size > _MAX_JSON_BYTES:
        raise ModelError(
            f"{path} has {file.size} bytes; at most {_MAX_JSON_BYTES} are read. {DOWNLOAD_AGAIN}"
        )
    return file.map[:]


def parse_object(path: Path | str, text: bytes, *, unique_keys: bool = False) -> dict[str, Any]:
    """Parse JSON that must be one object. path: what the error names."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique_keys if unique_keys else None
        )
    except RecursionError:
        raise ModelError(f"{path} is no valid JSON: nested too deeply. {DOWNLOAD_AGAIN}") from None
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON: {error}. {DOWNLOAD_AGAIN}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object. {DOWNLOAD_AGAIN}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _read_index(path: Path) -> dict[str, str]:
    """Which file of the directory holds each tensor."""
    places = parse_object(path, _read_json(path)).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{path} has no weight_map of tensors to files. {DOWNLOAD_AGAIN}")
    for name in places.values():
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name) or not name.isprintable():
            raise ModelError(
                f"{path} names the file {shown(str(name))}, which is no .safetensors file in its "
                f"own directory. {DOWNLOAD_AGAIN}"
            )
    return places


def _read_entry(file: MappedFile, data_start: int, name: str, value: Any) -> _Entry:
    """One tensor's entry, held against the file. `data_start`: where tensor bytes begin."""

    def fail(problem: str) -> ModelError:
        return ModelError(
            f"{file.path} is no valid safetensors file: tensor {shown(name)} {problem}. "
            f"{DOWNLOAD_AGAIN}"
        )

    if not isinstance(value, dict):
        raise fail("is described by no object")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets):
        raise fail("lacks a dtype, a shape or data_offsets")
    if dtype not in _BITS:
        raise ModelError(
            f"{file.path} stores tensor {shown(name)} as {shown(dtype)}, which is not known. "
            "Use a checkpoint with F32, F16 or BF16 weights."
        )
    if len(shape) > _MAX_DIMENSIONS:
        raise fail(f"has {len(shape)} dimensions; at most {_MAX_DIMENSIONS} are read")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= file.size - data_start:
        raise fail(f"lies outside the file, at {shown(str(offsets))}")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * _BITS[dtype] != nbytes * 8:
        raise fail(f"has {nbytes} bytes, which is not what {dtype} and its shape take")
    info = TensorInfo(name=name, type=dtype, shape=tuple(shape), nbytes=nbytes)
    return _Entry(info=info, file=file, start=data_start + offsets[0])


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_overlaps(path: Path, entries: Iterable[_Entry]) -> None:
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.info.nbytes)):
        if entry.start < end:
            raise ModelError(
                f"{path} is no valid safetensors file: the bytes of tensor "
                f"{shown(entry.info.name)} overlap another's. {DOWNLOAD_AGAIN}"
            )
        end = entry.start + entry.info.nbytes


def _why_no_weights(path: Path) -> str:
    names = directory_names(path)
    if "adapter_config.json" in names:
        return f"{path} holds an adapter, not a model. Give the directory of its base model."
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return (
            f"{path} holds {', '.join(map(shown, others[:5]))}, but neither {SINGLE_NAME} nor "
            f"{INDEX_NAME}. Download the checkpoint that Hugging Face's transformers writes."
        )
    if any(Path(name).suffix in PICKLE_SUFFIXES for name in names):
        return (
            f"{path} holds only pickled weights, which can run code when read and are refused. "
            "Download the model's safetensors, or convert it: "
            "AutoModel.from_pretrained(PATH).save_pretrained(NEW_PATH)."
        )
    return f"{path} holds no weights: {SINGLE_NAME} and {INDEX_NAME} are missing. Download one."
