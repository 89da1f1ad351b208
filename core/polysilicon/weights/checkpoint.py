"""One face for every checkpoint format, and the choice of the format from the files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Weight
from polysilicon.weights.files import TensorInfo, directory_names, shown
from polysilicon.weights.gguf import SPLIT_NAME, GGUFFile
from polysilicon.weights.safetensors import (
    CONFIG_NAME,
    INDEX_NAME,
    PICKLE_SUFFIXES,
    SINGLE_NAME,
    SafetensorsDirectory,
)


class Checkpoint(Protocol):
    """An open checkpoint of one model. Also a context manager that closes it.

    format: `gguf` or `safetensors`; it decides how tensors are named and where the model's
    parameters stand (`GGUFFile.metadata`, `SafetensorsDirectory.config`).
    path: as it was opened. tensors: what the headers say, by the format's own names.
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


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file (or a part of a split set), or a directory of safetensors or of one GGUF.

    Where a directory holds both, the safetensors are taken; name the .gguf file for the other.
    Raises ModelError for everything else.
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


def _open_directory(path: Path) -> Checkpoint:
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
