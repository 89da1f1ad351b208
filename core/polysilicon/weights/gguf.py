"""GGUF checkpoints: one file or a split set, read as Hugging Face's convention has the weights."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import (
    Dense,
    Float32,
    GroupAffine,
    GroupFloat,
    Weight,
    scale_values,
)
from polysilicon.weights.files import (
    DOWNLOAD_AGAIN,
    MappedFile,
    TensorInfo,
    header_fingerprint,
    shown,
)
from polysilicon.weights.gguf_blocks import SUPPORTED_TYPES, decode
from polysilicon.weights.gguf_header import Header, MetadataValue, TensorEntry, read_header
from polysilicon.weights.scale_checks import scale_problem

# Names that gguf-split gives: a stem, the part from 1, the number of parts.
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

_MISSING_SHOWN = 5

NORMS_PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3"})
"""Architectures to whose norm weights converters add 1, as their models scale by `1 + weight`."""

ROWS_INTERLEAVED = frozenset({"llama", "granite"})
"""Architectures whose rows of q and k they put into the interleaved order of rotary pairs."""

_QUERY_OR_KEY = re.compile(r"blk\.(?P<layer>\d{1,6})\.attn_(?P<which>[qk])\.(weight|bias)")


class GGUFFile:
    """An open GGUF checkpoint, versions 2 and 3, little-endian; opening any part opens all.

    metadata: the first part's keys. Numbers and booleans are Python's, strings `str`, arrays of
    strings `tuple[str, ...]`, arrays of numbers read-only NumPy views of the file, which may be
    unaligned.
    tensors: every part's, in the order of the file, by GGUF's names (`blk.0.attn_q.weight`).

    The file is mapped, not read: a weight's dense arrays are views of the map and stay valid
    after `close`; the map goes with the last of them.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the file, or one of its parts, is missing or malformed."""
        self.path = path
        self._files: list[MappedFile] = []
        self._sizes: list[int] = []
        self._entries: dict[str, tuple[MappedFile, TensorEntry]] = {}
        first = self._open_parts(_part_paths(path))
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(first.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: entry.info for name, (_, entry) in self._entries.items()}
        )
        self._closed = False

    def _open_parts(self, paths: list[Path]) -> Header:
        """Open every part and check that they belong together; return the first one's header."""
        headers = []
        for index, path in enumerate(paths):
            file = MappedFile(path)
            header = read_header(file)
            _check_split(path, header, index, len(paths))
            for name, entry in header.tensors.items():
                if name in self._entries:
                    raise ModelError(
                        f"{path} and {self._entries[name][0].path} both hold tensor {shown(name)}. "
                        f"{DOWNLOAD_AGAIN}"
                    )
                self._entries[name] = (file, entry)
            self._files.append(file)
            self._sizes.append(header.size)
            headers.append(header)
        expected = _split_number(paths[0], headers[0], "split.tensors.count", len(self._entries))
        if len(paths) > 1 and expected != len(self._entries):
            raise ModelError(
                f"{paths[0]} announces {expected} tensors, but its {len(paths)} parts hold "
                f"{len(self._entries)}. Download all parts again, from one source."
            )
        return headers[0]

    def weight(self, name: str) -> Weight:
        """One tensor in its canonical encoding, at its size in the file, in Hugging Face's order.

        What converters change is undone: rows of q and k of llama and granite are put back from the
        interleaved to the half-split order of rotary pairs, and the 1 added to the norms of gemma,
        gemma2 and gemma3 is subtracted (float32). A factor that stands beside a weight
        (`blk.0.attn_q.scale`, as NVFP4 has) goes into its scales.

        Raises ModelError for an unknown name, for a type that is not supported, for scales that are
        not finite or make values that are not, and where the metadata does not fit the tensor.
        """
        self._check_open()
        if name not in self._entries:
            raise ModelError(
                f"{self.path} has no tensor {shown(name)}. Use a file that holds the whole model."
            )
        file, entry = self._entries[name]
        if entry.kind.name not in SUPPORTED_TYPES:
            raise ModelError(
                f"{self.path} stores tensor {shown(name)} as {entry.kind.name}, which is not "
                "supported for weights. Use a file of another quantisation, such as Q8_0 or Q4_K."
            )
        data = file.data(entry.start, entry.info.nbytes)
        weight = decode(data, entry.kind, entry.info.shape)
        factor = name.removesuffix(".weight") + ".scale"
        if name.endswith(".weight") and factor in self._entries:
            weight = _times(weight, self._factor(factor, weight.shape))
        if problem := scale_problem(weight):
            raise ModelError(f"{self.path}: tensor {shown(name)} has {problem}. {DOWNLOAD_AGAIN}")
        architecture = str(self.metadata.get("general.architecture"))
        query_or_key = _QUERY_OR_KEY.fullmatch(name)
        if architecture in ROWS_INTERLEAVED and query_or_key:
            layer, which = int(query_or_key["layer"]), query_or_key["which"]
            heads = self._head_count(layer, key=which == "k")
            return weight.take_rows(_half_split_rows(self.path, name, weight.shape, heads))
        if name.endswith("norm.weight") and architecture in NORMS_PLUS_ONE:
            return Dense(array=weight.dequantize() - np.float32(1))
        return weight

    def _factor(self, name: str, shape: tuple[int, ...]) -> Float32:
        """The factor of a whole matrix, or one for each of a stack's experts: `[1]` or `[E]`."""
        _, entry = self._entries[name]
        experts = shape[0] if len(shape) == 3 else 1
        if entry.kind.name != "F32" or entry.info.shape not in {(1,), (experts,)}:
            raise ModelError(
                f"{self.path}: tensor {shown(name)} is {entry.kind.name} of shape "
                f"{entry.info.shape}; a factor of weights is F32 of shape {(experts,)}. "
                "Convert the model again with a current llama.cpp."
            )
        values = self.weight(name).dequantize()
        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.path}: tensor {shown(name)} is NaN or infinite. {DOWNLOAD_AGAIN}"
            )
        return values

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path} is closed")

    def _head_count(self, layer: int, *, key: bool) -> int:
        """Heads of one layer's queries or keys; the metadata may list them by layer."""
        name = f"{self.metadata['general.architecture']}.attention.head_count"
        if key and f"{name}_kv" in self.metadata:
            name = f"{name}_kv"
        value = self.metadata.get(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and layer < len(value):
            value = int(value[layer])
        if type(value) is not int or value < 1:
            raise ModelError(
                f"{self.path} has no usable number of heads in {name} for layer {layer}. "
                "Convert the model again with a current llama.cpp."
            )
        return value

    def fingerprint(self) -> str:
        """The model's identity: hex SHA-256 over headers, file sizes and samples of every tensor.

        Cheap (4 KiB of each tensor are read) and the same for every copy of the file. Two files
        whose tensors differ only outside the samples would share it.
        """
        self._check_open()
        parts = []
        for file, size in zip(self._files, self._sizes, strict=True):
            parts += [file.size.to_bytes(8, "little"), file.map[:size]]
        return header_fingerprint(
            parts,
            (file.data(entry.start, entry.info.nbytes) for file, entry in self._entries.values()),
        )

    def close(self) -> None:
        """Let go of the file. Weights and metadata already handed out stay valid."""
        self._closed = True
        self._files.clear()
        self._entries.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _part_paths(path: Path) -> list[Path]:
    """All parts of the set that `path` belongs to, in order; `path` alone if it is whole."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) == 1:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["part"]) <= count:
        raise ModelError(
            f"{path} is named part {int(match['part'])} of {count}, which cannot be. "
            "Give the file the name that it was published with."
        )
    paths = [
        path.with_name(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf")
        for part in range(1, count + 1)
    ]
    missing = [part.name for part in paths if not os.path.exists(part)]
    if missing:
        more = ", ..." if len(missing) > _MISSING_SHOWN else ""
        raise ModelError(
            f"{path} is one of {count} parts and {len(missing)} are missing: "
            f"{', '.join(missing[:_MISSING_SHOWN])}{more}. Download them into {path.parent}."
        )
    return paths


def _check_split(path: Path, header: Header, index: int, count: int) -> None:
    """Hold what a part's metadata says of the split against the parts that were found."""
    said_count = _split_number(path, header, "split.count", 1)
    said_index = _split_number(path, header, "split.no", 0)
    if said_count in (0, 1) and count == 1:
        return
    if count == 1:
        raise ModelError(
            f"{path} is one of {said_count} parts of a model, but its name does not say which. "
            "Give all parts the names that they were published with: NAME-00001-of-00003.gguf."
        )
    if said_count != count or said_index != index:
        raise ModelError(
            f"{path} is named part {index + 1} of {count}, but its metadata does not agree "
            f"(split.no {said_index}, split.count {said_count}). "
            "Download all parts again, from one source."
        )


def _split_number(path: Path, header: Header, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int:
        raise ModelError(f"{path} is no valid GGUF file: {key} is no integer. {DOWNLOAD_AGAIN}")
    return value


def _times(weight: Weight, factor: Float32) -> Weight:
    """The weight times a factor of the whole, `[1]`, or of each expert, `[E]`, in float32."""
    if factor.size > 1:
        factor = factor.reshape(-1, 1, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(weight, Dense):
            return Dense(array=weight.dequantize() * factor)
        assert isinstance(weight, GroupAffine | GroupFloat)
        scale = scale_values(weight.scale) * factor
        if isinstance(weight, GroupFloat) or weight.bias is None:
            return dataclasses.replace(weight, scale=scale)
        return dataclasses.replace(weight, scale=scale, bias=scale_values(weight.bias) * factor)


def _half_split_rows(
    path: Path, name: str, shape: tuple[int, ...], heads: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each row in half-split order, the row that holds it in llama.cpp's interleaved order.

    The converter stores rows i and i + d/2 of a head of d rows, one rotary pair, as 2i and 2i + 1.
    """
    rows = shape[0]
    if rows % (2 * heads):
        raise ModelError(
            f"{path} says {heads} heads, which do not divide the {rows} rows of {shown(name)} into "
            "pairs. Convert the model again with a current llama.cpp."
        )
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
