"""The model that is quantised: its parameters, and the tensors of the checkpoint to be written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError
from polysilicon.models.architecture import Architecture
from polysilicon.models.loading import find_sources, read_config
from polysilicon.models.mixtral import MIXTRAL
from polysilicon.models.names import Shape, Source, TensorNames
from polysilicon.models.placing import as_expected
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Dense, Float32, Weight
from polysilicon.weights.files import shown
from polysilicon.weights.stacks import take_matrix

TABLES = frozenset({"embedding", "head"})
"""The family's own names of the embedding table and the output projection."""

# What chooses between experts is small, and a wrong choice costs more than a rounded product.
# So are the weights of norms by head.
_LEFT_DENSE = frozenset({"router", "shared_router", "q_head_norm", "k_head_norm"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What one parameter gives to a tensor: `rows` of it, all where that is None; of a stack of
    experts the matrix `expert`, all where that is None."""

    key: str
    rows: range | None
    expert: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """One tensor of the checkpoint to be written.

    name: there. shape: logical. parts: the parameters that it holds. table: the embedding table or
    the output projection. linear: a matrix that is multiplied by, and so may be quantised, or a
    stack of such.
    """

    name: str
    shape: Shape
    parts: tuple[Part, ...]
    table: bool
    linear: bool

    @property
    def matrices(self) -> int:
        """How many matrices it holds: one, or those of a stack."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def module(self) -> str:
        """The family's own name of the module, of the first where it holds several."""
        return self.parts[0].key.rpartition(".")[0].rpartition(".")[2]

    def expert(self, part: Part, matrix: int) -> int | None:
        """Whose the values of one of the matrices are; None outside mixtures of experts."""
        return matrix if part.expert is None and len(self.shape) == 3 else part.expert


class ModelSource:
    """An open checkpoint as the parameters of its family, whatever format it is in.

    family, config: as `read_config` gives them. units: the tensors to be written, by name, in the
    order of the layers. places: by key of a parameter, the units that hold it; of a stack, those of
    its experts in order, or the one that holds all. head: name that the output projection's module
    has there, whether or not it has a tensor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        gguf: bool,
        stacks: bool = False,
        added: Sequence[Architecture] = (),
    ) -> None:
        """gguf: whether names and layout of the tensors to be written are GGUF's. stacks: whether
        those of experts are to be stacks, as GGUF's always are. added: architectures of plugins.

        Raises ModelError for a checkpoint that cannot be read, and for a family whose tensors have
        no names in such a checkpoint.
        """
        self.checkpoint = checkpoint
        self.family, self.config, names = read_config(checkpoint, added=added)
        self.shapes = self.family.shapes(self.config)
        self._sources = find_sources(checkpoint, self.family, self.config, names)
        self._held: tuple[str, Weight] | None = None
        written = self._written(names, gguf, stacks)
        self.head = written.of("head.weight").removesuffix(".weight")
        self.units = _units(written, self.shapes)
        self.places: dict[str, list[Unit]] = {key: [] for key in self.shapes}
        for unit in self.units.values():
            for part in unit.parts:
                self.places[part.key].append(unit)

    def _written(self, names: TensorNames, gguf: bool, stacks: bool) -> TensorNames:
        """The names to be written: those of the checkpoint, where they are of the right kind."""
        family = self.family
        if family.name == "llama" and self.config.experts is not None:
            # Mixtral's GGUF files call themselves llama.
            family = MIXTRAL
        known = [family.gguf_tensors] if gguf else list(family.hf_tensors)
        if names in known:
            known.insert(0, names)
        for candidate in known:
            if _fits(candidate, self.shapes, stacks or gguf):
                return candidate
        if any(all(candidate.knows(key) for key in self.shapes) for candidate in known):
            form, other = "tensors of their own", "mlx, or a GGUF type such as q4_k_m"
            if stacks or gguf:
                form, other = "stacks of their matrices", "compressed-tensors"
            raise ModelError(
                f"experts of {family.name} are not published as {form}, which this format has: no "
                f"other tool would read them. Choose --to {other}, or quantise at load: --quantize."
            )
        raise ModelError(
            f"this model's tensors ({family.name}) have no names in this format that other tools "
            "know. Keep its container: from GGUF choose a GGUF type such as q4_k_m, or give the "
            "model's safetensors."
        )

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
        """One parameter, as the family has it; dense where several tensors make it."""
        source = self._sources[key]
        weights = [
            source.take(as_expected(self.checkpoint.weight(name), source))
            for name in source.tensors
        ]
        if len(weights) == 1:
            return weights[0]
        return Dense(array=np.stack([weight.dequantize() for weight in weights]))

    def expert(self, key: str, expert: int) -> Float32:
        """One matrix of a stack of experts, float32 `[N, K]`."""
        source = self._sources[key]
        if len(source.shape) == 3:
            weight = self._last(source.tensors[0])
            if isinstance(weight, Dense):
                array = weight.array.reshape(source.stored_shapes(quantized=False)[0])
                weight = Dense(array=array)
            source = dataclasses.replace(source, shape=source.shape[1:])
            weight = take_matrix(weight, expert)
        else:
            weight = self.checkpoint.weight(source.tensors[expert])
        return source.take(as_expected(weight, source)).dequantize()

    def _last(self, name: str) -> Weight:
        """A tensor that is asked for again and again, once for each of its experts."""
        if self._held is None or self._held[0] != name:
            self._held = None
            self._held = name, self.checkpoint.weight(name)
        return self._held[1]

    def values(self, unit: Unit, matrix: int | None = None) -> Float32:
        """A unit's values, float32, or those of one of its matrices. Raises ModelError where they
        are not finite."""
        if matrix is None and unit.matrices > 1:
            return np.stack([self.values(unit, index) for index in range(unit.matrices)])
        if len(unit.parts) == 1 and unit.parts[0].rows is None:
            values = self._part(unit, unit.parts[0], matrix or 0)
        else:
            values = np.empty(unit.shape[-2:], np.float32)
            for part in unit.parts:
                rows = slice(None) if part.rows is None else np.asarray(part.rows)
                values[rows] = self._part(unit, part, matrix or 0)
        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.checkpoint.path}: {shown(unit.name)} holds infinities or NaN and cannot be "
                "quantised. Download the model again."
            )
        return values.reshape(unit.shape) if matrix is None else values

    def _part(self, unit: Unit, part: Part, matrix: int) -> Float32:
        expert = unit.expert(part, matrix)
        if expert is None:
            return self.parameter(part.key).dequantize()
        return self.expert(part.key, expert)

    def place(self, key: str, expert: int | None = None) -> tuple[Unit, int]:
        """The unit that holds a parameter, or an expert's part of it, and which of its matrices."""
        units = self.places[key]
        if expert is None or len(units[0].shape) == 3:
            (unit,) = units
            return unit, expert or 0
        return units[expert], 0

    def rows(self, unit: Unit, key: str) -> npt.NDArray[np.int64] | None:
        """The rows that a parameter has in a unit; None for all."""
        (part,) = (part for part in unit.parts if part.key == key)
        return None if part.rows is None else np.asarray(part.rows, np.int64)


def _fits(names: TensorNames, shapes: Mapping[str, Shape], stacks: bool) -> bool:
    """Whether every parameter has a name among these, those of experts in the form asked for."""
    for key, shape in shapes.items():
        if not names.knows(key):
            return False
        source = names.source(key, shapes)
        if source.inputs_first:
            return False
        if len(shape) == 3 and (len(source.shape) == 3, source.rows) != (stacks, None):
            return False
    return True


def _units(names: TensorNames, shapes: Mapping[str, Shape]) -> dict[str, Unit]:
    parts: dict[str, list[Part]] = {}
    places: dict[str, Source] = {}
    for key, shape in shapes.items():
        source = names.source(key, shapes)
        by_expert = len(source.shape) < len(shape)
        for expert, name in enumerate(source.tensors):
            part = Part(key=key, rows=source.rows, expert=expert if by_expert else None)
            parts.setdefault(name, []).append(part)
            places[name] = source
    units = {}
    for name, held in parts.items():
        module = held[0].key.rpartition(".")[0].rpartition(".")[2]
        shape = places[name].shape
        linear = len(shape) > 1 and held[0].key.endswith(".weight") and module not in _LEFT_DENSE
        units[name] = Unit(
            name=name, shape=shape, parts=tuple(held), table=module in TABLES, linear=linear
        )
    return units
