"""Checkpoints that are not quantised: every tensor is what it is."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from polysilicon.errors import ModelError
from polysilicon.weights.files import TensorInfo, shown
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import expect_method, stated_settings
from polysilicon.weights.safetensors import SUPPORTED_TYPES, SafetensorsDirectory


def as_stored(files: SafetensorsDirectory, names: Iterable[str]) -> dict[str, LogicalTensor]:
    """Tensors that a format leaves as they are: excluded modules, norms, biases, buffers."""
    return {
        name: LogicalTensor(info=files.tensors[name], read=functools.partial(files.weight, name))
        for name in names
    }


def code_tensor(files: SafetensorsDirectory) -> TensorInfo | None:
    """A tensor that must hold codes, by its name and type, if there is one.

    Buffers that models carry along (position ids, masks) may have any type.
    """
    for info in files.tensors.values():
        if info.type not in SUPPORTED_TYPES and "weight" in info.name.rpartition(".")[2]:
            return info
    return None


class DenseFormat:
    """Plain F32, F16 and BF16 weights, as Hugging Face's transformers writes them."""

    name = "dense"
    encodings: Mapping[str, str] = {name: f"dense:{name.lower()}" for name in SUPPORTED_TYPES}

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        return stated_settings(files) is None and code_tensor(files) is None

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        expect_method(files, self.name, frozenset())
        codes = code_tensor(files)
        if codes is not None:
            raise ModelError(
                f"{files.path} stores tensor {shown(codes.name)} as {codes.type}: it is quantised. "
                "Leave --quantization out, so that the format is found from the files."
            )
        return as_stored(files, files.tensors)
