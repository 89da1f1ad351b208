"""The model that is quantised: its parameters, and the tensors of the checkpoint to be written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError
from polysilicon.models.architecture import Architecture
from polysilicon.models.loading import find_sources, read_config
from polysilicon.models.names import Shape, Source, TensorNames
from polysilicon.models.placing import as_expected
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Float32, Weight
from polysilicon.weights.files import shown

TABLES = frozenset({"embedding", "head"})
"""The family's own names of the embedding table and the output projection."""

# What chooses between experts is small, and a wrong choice costs more than a rounded product.
_LEFT_DENSE = frozenset({"router", "shared_router"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one parameter gives to a tensor: `rows` of it, all where that is None."""

    key: str
    rows: range | None
    expert: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One tensor of the checkpoint to be written.

    name: there. shape: logical. parts: the parameters that it holds. table: the embedding table or
    the output projection. linear: a matrix that is multiplied by, and so may be quantised.
    """

    name: str
    shape: Shape
    parts: tuple[Part, ...]
    table: bool
    linear: bool


class ModelSource:
    """An open checkpoint as the parameters of its family, whatever format it is in.

    family, config: as `read_config` gives them. units: the tensors to be written, by name, in the
    order of the layers. places: by key of a matrix, the units that hold it. head: name that the
    output projection's module has there, whether or not it has a tensor.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, gguf: bool, added: Sequence[Architecture] = ()
    ) -> None:
        """gguf: whether names and layout of the tensors to be written are GGUF's. added:
        architectures of plugins.

        Raises ModelError for a checkpoint that cannot be read, and for a family whose tensors lie
        in a way that is not written.
        """
        self.checkpoint = checkpoint
        self.family, self.config, names = read_config(checkpoint, added=added)
        self.shapes = self.family.shapes(self.config)
        self._sources = find_sources(checkpoint, self.family, self.config, names)
        if gguf == (checkpoint.format == "gguf"):
            written = names
        else:
            written = self.family.gguf_tensors if gguf else self.family.hf_tensors[0]
        self.head = written.of("head.weight").removesuffix(".weight")
        self.units = _units(self.family, written, self.shapes)
        self.places: dict[str, list[Unit]] = {key: [] for key in self.shapes}
        for unit in self.units.values():
            for part in unit.parts:
                self.places[part.key].append(unit)

    @property
    def unknown(self) -> list[str]:
        """Tensors of the checkpoint that the family has no use for, and that are not carried."""
        known = {name for source in self._sources.values() for name in source.tensors}
        return sorted(set(self.checkpoint.tensors) - known)

    @property
    def dense_dtype(self) -> str:
        """The 16-bit dtype for what stays dense: the checkpoint's, where it has one."""
        types = {
            self.checkpoint.tensors[name].type
            for key, source in self._sources.items()
            if key.endswith("norm.weight")
            for name in source.tensors
        }
        if types == {"F16"}:
            return "f16"
        # Gemma was trained with activations that leave f16's range.
        return "bf16" if types == {"BF16"} or self.family.name.startswith("gemma") else "f16"

    def parameter(self, key: str) -> Weight:
        """One parameter, as the family has it, that is no stack of experts."""
        source = self._sources[key]
        assert len(source.tensors) == 1
        return source.take(as_expected(self.checkpoint.weight(source.tensors[0]), source))

    def expert(self, key: str, expert: int) -> Float32:
        """One matrix of a stack of experts, float32 `[N, K]`."""
        source = self._sources[key]
        if len(source.tensors) == 1:
            stack: Float32 = self.parameter(key).dequantize()
            return np.asarray(stack[expert])
        weight = as_expected(self.checkpoint.weight(source.tensors[expert]), source)
        return source.take(weight).dequantize()

    def values(self, unit: Unit) -> Float32:
        """A unit's values, float32. Raises ModelError where they are not finite."""
        if len(unit.parts) == 1 and unit.parts[0].rows is None:
            values = self._part(unit.parts[0])
        else:
            values = np.empty(unit.shape, np.float32)
            for part in unit.parts:
                rows = slice(None) if part.rows is None else np.asarray(part.rows)
                values[rows] = self._part(part)
        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.checkpoint.path}: {shown(unit.name)} holds infinities or NaN and cannot be "
                "quantised. Download the model again."
            )
        return values

    def _part(self, part: Part) -> Float32:
        if part.expert is None:
            return self.parameter(part.key).dequantize()
        return self.expert(part.key, part.expert)

    def rows(self, unit: Unit, key: str) -> npt.NDArray[np.int64] | None:
        """The rows that a parameter has in a unit; None for all."""
        (part,) = (part for part in unit.parts if part.key == key)
        return None if part.rows is None else np.asarray(part.rows, np.int64)


def _units(
    family: Architecture,
    names: TensorNames,
    shapes: Mapping[str, Shape],
) -> dict[str, Unit]:
    parts: dict[str, list[Part]] = {}
    places: dict[str, Source] = {}
    for key in shapes:
        source = names.source(key, shapes)
        several = len(source.tensors) > 1
        for expert, name in enumerate(source.tensors):
            part = Part(key=key, rows=source.rows, expert=expert if several else None)
            parts.setdefault(name, []).append(part)
            places[name] = source
    units = {}
    for name, held in parts.items():
        module = held[0].key.rpartition(".")[0].rpartition(".")[2]
        shape = places[name].shape
        linear = len(shape) == 2 and held[0].key.endswith(".weight") and module not in _LEFT_DENSE
        if places[name].inputs_first or len(shape) > 2:
            raise ModelError(
                f"{family.name} stores {shown(name)} as experts stacked in one tensor, which "
                "`quantize` does not write. Quantise it at load with --quantize instead."
            )
        units[name] = Unit(
            name=name, shape=shape, parts=tuple(held), table=module in TABLES, linear=linear
        )
    return units
