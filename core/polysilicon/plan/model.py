"""The model that is planned for, from a config.json or a GGUF header: no weight is read."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polysilicon.catalogue import resolve_model
from polysilicon.errors import ConfigError, ModelError
from polysilicon.format_matrix import formats
from polysilicon.hub import PREFIX, fetch_config
from polysilicon.models.architecture import Architecture
from polysilicon.models.config import ModelConfig
from polysilicon.models.loading import read_config
from polysilicon.models.quantizing import QUANTIZE_SCHEMES, quantize_loaded, quantized_already
from polysilicon.models.registry import architectures, find_hf
from polysilicon.plan.stored import StoredWeights, stored_weights
from polysilicon.progress import Progress, no_progress
from polysilicon.suggest import nearest
from polysilicon.weights.checkpoint import Checkpoint, open_checkpoint
from polysilicon.weights.encodings import DENSE_DTYPES, Dense, Weight
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import directory_names, shown
from polysilicon.weights.formats.format import CheckpointFormat
from polysilicon.weights.safetensors import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, read_object

NONE = "none"
"""The quantisation of weights that stay as they are stored."""

_WIDE = 1 << 16
"""Inputs of a matrix beyond which not even one row of it is made: a config can ask for billions."""

SCHEMES = (NONE, *QUANTIZE_SCHEMES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """One parameter. key: the family's own name. shape: logical, outputs first. nbytes: as it is
    stored or placed. encoding: as `Weight.encoding` spells it; a reader's own name for the type
    where only a reader of the weights could tell."""

    key: str
    shape: tuple[int, ...]
    nbytes: int
    encoding: str

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is multiplied with: a matrix or a stack of experts' matrices."""
        return len(self.shape) > 1 and self.key.endswith(".weight")

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of experts' matrices."""
        return self.is_matrix and len(self.shape) > 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model by its parameters. name: as the user wrote it. parameters: how many the checkpoint
    has. notes: what the user should know of how it was counted."""

    name: str
    config: ModelConfig
    parameters: int
    tensors: tuple[PlannedTensor, ...]
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def open_model(
    spec: str | None,
    *,
    architectures_added: Sequence[Architecture] = (),
    formats_added: Sequence[CheckpointFormat] = (),
    progress: Progress = no_progress,
) -> PlannedModel:
    """The model that `spec` names: a GGUF file, a directory with a config.json or that file alone,
    `hf:owner/repo`, of which only config.json is fetched, or a name of the catalogue.

    Where weights stand beside config.json their headers are read, which tell exact sizes. Raises
    ModelError and DownloadError as loading does.
    """
    if spec is not None and spec.startswith(PREFIX):
        path = fetch_config(spec)
    else:
        path = resolve_model(spec, progress=progress)
    name = spec or path.name
    if path.is_dir():
        names = directory_names(path)
        if CONFIG_NAME in names and not {SINGLE_NAME, INDEX_NAME} & set(names):
            path = path / CONFIG_NAME
    if path.name.endswith(".json"):
        return _from_config(name, path, architectures(architectures_added))
    with open_checkpoint(path, added=formats_added) as checkpoint:
        encodings = {
            item.type: item.encoding
            for item in formats(formats_added)
            if item.container == checkpoint.format
        }
        return _from_checkpoint(name, checkpoint, architectures_added, encodings)


def _from_config(name: str, path: Path, families: Sequence[Architecture]) -> PlannedModel:
    values = read_object(path)
    fields = Fields(values, str(path))
    family = find_hf(fields, families)
    config = family.read_hf(fields, None)
    stored = stored_weights(values, str(path))
    tensors = tuple(_planned(key, shape, stored) for key, shape in family.shapes(config).items())
    return _counted(name, config, tensors, notes=stored.notes)


def _planned(key: str, shape: tuple[int, ...], stored: StoredWeights) -> PlannedTensor:
    dense = f"dense:{stored.dtype}"
    tensor = PlannedTensor(key=key, shape=shape, nbytes=0, encoding=dense)
    bits = 8.0 * DENSE_DTYPES[stored.dtype].itemsize
    is_quantized = tensor.is_matrix and key.startswith("layers.")
    if stored.experts_only:
        is_quantized = tensor.is_stack
    if stored.bits is not None and is_quantized:
        bits = stored.bits
        tensor = dataclasses.replace(tensor, encoding=stored.encoding)
    return dataclasses.replace(tensor, nbytes=math.ceil(tensor.parameters * bits / 8))


def _from_checkpoint(
    name: str,
    checkpoint: Checkpoint,
    added: Sequence[Architecture],
    encodings: Mapping[str, str],
) -> PlannedModel:
    """encodings: by the tensors' types."""
    family, config, names = read_config(checkpoint, added=added)
    shapes = family.shapes(config)
    tensors = []
    for key, shape in shapes.items():
        source = names.source(key, shapes)
        missing = [tensor for tensor in source.tensors if tensor not in checkpoint.tensors]
        if missing:
            raise ModelError(
                f"{checkpoint.path} lacks tensor {shown(missing[0])}, which its parameters call "
                "for. Use the complete checkpoint of this model."
            )
        infos = [checkpoint.tensors[tensor] for tensor in source.tensors]
        nbytes = sum(info.nbytes for info in infos)
        if source.rows is not None:
            # The file has other parameters in the same tensor.
            nbytes = nbytes * math.prod(shape) // max(1, sum(math.prod(i.shape) for i in infos))
        encoding = encodings.get(infos[0].type, infos[0].type)
        tensors.append(PlannedTensor(key=key, shape=shape, nbytes=nbytes, encoding=encoding))
    return _counted(name, config, tensors)


def _counted(
    name: str, config: ModelConfig, tensors: Sequence[PlannedTensor], notes: tuple[str, ...] = ()
) -> PlannedModel:
    return PlannedModel(
        name=name,
        config=config,
        parameters=sum(tensor.parameters for tensor in tensors),
        tensors=tuple(tensors),
        notes=notes,
    )


def quantized(model: PlannedModel, scheme: str) -> PlannedModel:
    """The model as `--quantize` makes it; `NONE` leaves it as it is.

    Raises ConfigError for an unknown scheme, and for a model that is quantised already, as loading
    does.
    """
    if scheme == NONE:
        return model
    if scheme not in QUANTIZE_SCHEMES:
        raise ConfigError(
            f"--quantize {scheme!r:.80} is not known{nearest(scheme, SCHEMES) or '.'} Known are "
            f"{', '.join(SCHEMES)}"
        )
    dense = tuple(f"dense:{dtype}" for dtype in DENSE_DTYPES)
    encodings = Counter(tensor.encoding for tensor in model.tensors if tensor.is_matrix)
    coded = [encoding for encoding, _ in encodings.most_common() if encoding not in dense]
    if coded:
        raise quantized_already(scheme, model.name, ", ".join(coded))
    tensors = tuple(
        _quantized(tensor, scheme, model.name) if tensor.is_matrix else tensor
        for tensor in model.tensors
    )
    return dataclasses.replace(model, tensors=tensors)


def _quantized(tensor: PlannedTensor, scheme: str, source: str) -> PlannedTensor:
    """By the scheme's own function, of one row of zeros."""
    dtype = DENSE_DTYPES[tensor.encoding.removeprefix("dense:")]
    width = tensor.shape[-1]
    if width <= _WIDE:
        row = _row_of(tensor, width, dtype, scheme, source)
        nbytes = row.nbytes
    else:
        # Nothing but the width itself grows with the width.
        narrow = _WIDE - 256 + width % 256
        row = _row_of(tensor, narrow, dtype, scheme, source)
        wider = _row_of(tensor, narrow + 256, dtype, scheme, source)
        nbytes = row.nbytes + (width - narrow) // 256 * (wider.nbytes - row.nbytes)
    rows = math.prod(tensor.shape[:-1])
    return dataclasses.replace(tensor, nbytes=nbytes * rows, encoding=row.encoding)


def _row_of(
    tensor: PlannedTensor, width: int, dtype: np.dtype[Any], scheme: str, source: str
) -> Weight:
    zeros = Dense(array=np.zeros((1, width), dtype))
    return quantize_loaded(zeros, tensor.key, scheme, source)
