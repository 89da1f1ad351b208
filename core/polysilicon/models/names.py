"""Where a family's parameters stand in a checkpoint: names of tensors, and how they are laid out.

A family has one name and one shape for each parameter (`layers.3.q.weight`), whatever the files
do: some fuse several matrices into one tensor, some store the experts of a stack one by one, and
some store matrices with their inputs first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from polysilicon.weights.encodings import Dense, Weight

Shape = tuple[int, ...]

_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused:
    """Modules whose outputs one tensor holds: all of the first, then all of the second, and so on;
    or interleaved, the first output of each, then the second of each."""

    modules: tuple[str, ...]
    interleaved: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What one parameter is read from.

    tensors: a name; for a stack that is stored expert by expert, one for each of them.
    shape: of each of the tensors. rows: the outputs to take, None for all; they are along the last
    axis of biases, else along the one before it.
    inputs_first: tensors that are not quantised have their last two axes swapped.
    """

    tensors: tuple[str, ...]
    shape: Shape
    rows: range | None = None
    bias: bool = False
    inputs_first: bool = False

    def take(self, weight: Weight) -> Weight:
        """The outputs of the parameter alone."""
        if self.rows is None:
            return weight
        index = np.asarray(self.rows, np.int64)
        if self.bias and len(weight.shape) > 1:
            return Dense(array=weight.dequantize().take(index, axis=-1))
        return weight.take_rows(index)

    def stored_shapes(self, quantized: bool) -> tuple[Shape, ...]:
        """The shapes that the file may state. A matrix of one row may be a vector, as llama.cpp's
        converter makes of it."""
        if quantized:
            return (self.shape,)
        if self.inputs_first:
            return ((*self.shape[:-2], self.shape[-1], self.shape[-2]),)
        return (self.shape, self.shape[1:]) if self.shape[0] == 1 else (self.shape,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNames:
    """How one kind of checkpoint names a family's modules.

    modules: name in the file by the family's own name, without `.weight` or `.bias`; of a layer's
    modules the own name is `layers.q` and the file's has `{layer}` in it, and `{expert}` where the
    experts of a stack are tensors of their own.
    tensors: whole names in the file, for those that do not end so, by `layers.sinks.weight`.
    fused: modules of the file that hold several of the family's.
    inputs_first: modules of the file whose matrices are `[K, N]` where they are not quantised.
    """

    modules: Mapping[str, str]
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: Mapping[str, Fused] = dataclasses.field(default_factory=dict)
    inputs_first: frozenset[str] = frozenset()

    def with_modules(self, modules: Mapping[str, str]) -> TensorNames:
        """The same names with these modules added, or instead."""
        return dataclasses.replace(self, modules={**self.modules, **modules})

    def knows(self, key: str) -> bool:
        """Whether the parameter of a key has a name here."""
        path, _, kind = key.rpartition(".")
        prefix, _, module = _split(path)
        name = f"{prefix}{module}"
        holders = [name, *(fused for fused, held in self.fused.items() if name in held.modules)]
        return any(f"{held}.{kind}" in self.tensors or held in self.modules for held in holders)

    def of(self, key: str, expert: int = 0) -> str:
        """The tensor of a key such as `embedding.weight` or `layers.3.q.bias`."""
        path, _, kind = key.rpartition(".")
        prefix, layer, module = _split(path)
        name = f"{prefix}{module}"
        if f"{name}.{kind}" in self.tensors:
            return self.tensors[f"{name}.{kind}"].format(layer=layer)
        return f"{self.modules[name].format(layer=layer, expert=expert)}.{kind}"

    def source(self, key: str, shapes: Mapping[str, Shape]) -> Source:
        """Where the parameter of a key stands. shapes: of all parameters, by key."""
        path, _, kind = key.rpartition(".")
        prefix, layer, module = _split(path)
        shape, rows, holder = shapes[key], None, f"{prefix}{module}"
        at = f"{prefix}{layer}." if layer else prefix
        for fused, parts in self.fused.items():
            if holder in parts.modules:
                axis = -2 if kind == "weight" else -1
                sizes = [
                    shapes[f"{at}{part.removeprefix(prefix)}.{kind}"][axis]
                    for part in parts.modules
                ]
                rows = _rows(parts, parts.modules.index(holder), sizes)
                shape = (*shape[: len(shape) + axis], sum(sizes), *shape[len(shape) + axis + 1 :])
                holder = fused
                key = f"{at}{fused.removeprefix(prefix)}.{kind}"
        if "{expert}" in self.modules.get(holder, ""):
            names = tuple(self.of(key, expert) for expert in range(shape[0]))
            return Source(tensors=names, shape=shape[1:], rows=rows, bias=kind == "bias")
        return Source(
            tensors=(self.of(key),),
            shape=shape,
            rows=rows,
            bias=kind == "bias",
            inputs_first=kind == "weight" and holder in self.inputs_first,
        )

    def of_layers(self, names: Iterable[str], layers: int) -> list[str]:
        """Those of a checkpoint's names that are of one of the first `layers` layers and of a
        module known here, whatever its expert."""
        templates = {
            *(f"{name}.{kind}" for name in self.modules.values() for kind in ("weight", "bias")),
            *self.tensors.values(),
        }
        known = {name.format(layer="#", expert="#") for name in templates if "{layer}" in name}
        return [
            name
            for name in names
            if _NUMBER.sub("#", name) in known and int(_NUMBER.findall(name)[0]) < layers
        ]


def mlx_experts(block: str) -> dict[str, str]:
    """The stacks of a mixture's experts as mlx-lm saves them. block: the mixture's module."""
    return {
        f"layers.expert_{part}": f"{block}.switch_mlp.{part}_proj"
        for part in ("gate", "up", "down")
    }


def _split(path: str) -> tuple[str, str, str]:
    """`layers.3.q` as `layers.`, `3`, `q`; `embedding` as ``, ``, `embedding`."""
    if not path.startswith("layers."):
        return "", "", path
    _, layer, module = path.split(".")
    return "layers.", layer, module


def _rows(fused: Fused, place: int, sizes: list[int]) -> range:
    """The rows of one of the modules in the fused tensor."""
    if fused.interleaved:
        assert len(set(sizes)) == 1
        return range(place, sum(sizes), len(sizes))
    start = sum(sizes[:place])
    return range(start, start + sizes[place])
