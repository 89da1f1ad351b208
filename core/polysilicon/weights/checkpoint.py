"""One face for every checkpoint format, and the choice of the format from the files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Weight
from polysilicon.weights.files import TensorInfo, directory_names, shown
from polysilicon.weights.formats.format import CheckpointFormat
from polysilicon.weights.formats.kv_scales import has_fp8_kv_scales
from polysilicon.weights.formats.registry import AUTO, choose_format
from polysilicon.weights.gguf import SPLIT_NAME, GGUFFile
from polysilicon.weights.safetensors import (
    CONFIG_NAME,
    INDEX_NAME,
    PICKLE_SUFFIXES,
    SINGLE_NAME,
    SafetensorsDirectory,
)
from polysilicon.weights.scale_checks import scale_problem


class Checkpoint(Protocol):
    """An open checkpoint of one model. Also a context manager that closes it.

    format: `gguf` or `safetensors`; it decides how tensors are named and where the model's
    parameters stand (`GGUFFile.metadata`, `SafetensorsCheckpoint.config`).
    path: as it was opened. tensors: what the headers say, by the format's own names; a quantised
    weight has the name and the shape that it has in the unquantised model.
    """

    format: str
    path: Path
    tensors: Mapping[str, TensorInfo]

    def weight(self, name: str) -> Weight:
        """One tensor in its canonical encoding and in Hugging Face's convention.

        Raises ModelError for an unknown name and for a type that is not supported.
        """

    def fingerprint(self) -> str:
        """The model's identity, by which cached KV is named: hex SHA-256.

        Over headers, metadata or config, file sizes, and 4 KiB from the middle of each tensor: not
        over every byte. It tells fine-tunes of one base apart, but not two checkpoints that differ
        in a few rows outside the samples; and the same model in another format has another one.
        """

    def close(self) -> None:
        """Let go of the files; `weight` and `fingerprint` then raise ValueError.

        Weights may be views of mapped files. They stay valid, and keep the files mapped, for as
        long as they are referred to.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class SafetensorsCheckpoint:
    """A directory of safetensors, read through the format that its weights are stored in.

    config, generation_config: as in `SafetensorsDirectory`. quantization: name of the format.
    tensors: by Hugging Face's names for the unquantised model
    (`model.layers.0.self_attn.q_proj.weight`).
    """

    format = "safetensors"

    def __init__(
        self,
        files: SafetensorsDirectory,
        *,
        quantization: str = AUTO,
        added: Sequence[CheckpointFormat] = (),
    ) -> None:
        """quantization: name of the format, or `auto`. added: formats of plugins.

        Raises ModelError where no format reads the files, or not the one that is named.
        """
        self.path = files.path
        self.config, self.generation_config = files.config, files.generation_config
        self._files = files
        chosen = choose_format(files, quantization=quantization, added=added)
        self.quantization = chosen.name
        self._logical = chosen.open(files)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: tensor.info for name, tensor in self._logical.items()}
        )

    def weight(self, name: str) -> Weight:
        """One tensor in its canonical encoding, exactly. Raises ModelError for an unknown name, and
        for values that cannot be used."""
        self._files.check_open()
        if name not in self._logical:
            raise ModelError(
                f"{self.path} has no tensor {shown(name)}. Use a checkpoint of the whole model."
            )
        weight = self._logical[name].read()
        if problem := scale_problem(weight):
            raise ModelError(
                f"{self.path}: tensor {shown(name)} has {problem}. "
                "Download the checkpoint again, or quantise the model again with a current tool."
            )
        return weight

    def has_fp8_kv_scales(self) -> bool:
        """Whether the scales of KV that it may have are of fp8 e4m3. Raises ModelError where what
        its configuration says of them is malformed."""
        return has_fp8_kv_scales(self._files)

    def fingerprint(self) -> str:
        """The model's identity: that of the files, and of the format that they are read through."""
        return hashlib.sha256(
            f"{self._files.fingerprint()}/{self.quantization}".encode()
        ).hexdigest()

    def close(self) -> None:
        """Let go of the files. Weights already handed out stay valid."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_checkpoint(
    path: Path, *, quantization: str = AUTO, added: Sequence[CheckpointFormat] = ()
) -> Checkpoint:
    """Open a .gguf file (or a part of a split set), or a directory of safetensors or of one GGUF.

    Where a directory holds both, the safetensors are taken; name the .gguf file for the other.
    quantization: the format of a directory of safetensors, `auto` to find it from the files.
    added: formats of plugins. Raises ModelError for everything else.
    """
    files = open_files(path)
    if isinstance(files, SafetensorsDirectory):
        return SafetensorsCheckpoint(files, quantization=quantization, added=added)
    if quantization != AUTO:
        raise ModelError(
            f"{path} is GGUF, which says of each tensor how it is stored. "
            f"Leave --quantization {shown(quantization)} out."
        )
    return files


def open_files(path: Path) -> GGUFFile | SafetensorsDirectory:
    """The files of a checkpoint as they are, for its tokenizer and configuration.

    How weights are quantised is not looked at. Raises ModelError as `open_checkpoint` does.
    """
    if os.path.isdir(path):
        return _open_directory(path)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        raise ModelError(f"{path} is one file of a checkpoint. Give its directory, {path.parent}.")
    if suffix in PICKLE_SUFFIXES:
        raise ModelError(
            f"{path} is a pickle, which can run code when read and is refused. "
            "Use the model's safetensors or a GGUF file."
        )
    return GGUFFile(path)


def _open_directory(path: Path) -> GGUFFile | SafetensorsDirectory:
    names = directory_names(path)
    if SINGLE_NAME in names or INDEX_NAME in names:
        return SafetensorsDirectory(path)
    models: dict[object, str] = {}
    for name in names:
        if name.lower().endswith(".gguf"):
            split = SPLIT_NAME.fullmatch(name)
            models.setdefault((split["stem"], split["count"]) if split else name, name)
    if len(models) > 1:
        raise ModelError(
            f"{path} holds {len(models)} GGUF models: "
            f"{', '.join(map(shown, list(models.values())[:5]))}. Name one of them."
        )
    if models:
        return GGUFFile(path / next(iter(models.values())))
    if CONFIG_NAME in names or any(name.endswith(".safetensors") for name in names):
        return SafetensorsDirectory(path)
    raise ModelError(
        f"{path} holds no model: neither a .gguf file nor {SINGLE_NAME} with {CONFIG_NAME}. "
        "Check the path."
    )
