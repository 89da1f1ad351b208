"""A tiny Llama written in a quantised format, with the dense values that it must come out as.

Codes are packed bit by bit here, from the layouts' descriptions and without the reader's functions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from polysilicon.testing.tiny_models import TinyModel, tiny_llama

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Rng = np.random.Generator


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Module:
    """One quantised module. stored: what the file has, by name behind that of the module.
    values: what its weight is."""

    stored: Mapping[str, Array]
    values: Float32


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One way to store the tiny Llama.

    config: what stands in config.json beside the model's own. quantize: a module from its name
    (`model.layers.0.self_attn.q_proj`) and weight, None to leave it as it is. type: of the
    quantised tensors. ulps: by how many float32 roundings the values may be off. metadata: of the
    file, from what is stored.
    """

    name: str
    config: Mapping[str, Any]
    quantize: Callable[[Rng, str, Float32], Module | None]
    type: str
    ulps: int = 0
    metadata: Callable[[Mapping[str, Array]], dict[str, str]] | None = None

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Written:
    """The checkpoint's folder, the tensors and metadata in its file, and the dense twin of the
    model."""

    folder: Path
    stored: Mapping[str, Array]
    twin: TinyModel
    quantized: frozenset[str]
    metadata: Mapping[str, str]

    def rewrite(
        self,
        changes: Mapping[str, Array | None],
        config: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the file again with these tensors changed, or without those that are None.

        config: in place of what config.json says beside the model's own. metadata: of the file, in
        place of what it has.
        """
        tensors = {**self.stored, **changes}
        save_file(
            {
                name: np.array(array, order="C")
                for name, array in tensors.items()
                if array is not None
            },
            self.folder / "model.safetensors",
            metadata=dict(self.metadata if metadata is None else metadata) or None,
        )
        if config is not None:
            path = self.folder / "config.json"
            path.write_text(json.dumps({**self.twin.config, **config}))


def write(folder: Path, case: Case, rng: Rng) -> Written:
    """Write the tiny Llama as a directory in the case's format."""
    model = tiny_llama()
    stored: dict[str, Array] = {}
    values: dict[str, Float32] = {}
    quantized = set()
    for name, weight in model.tensors.items():
        module = name.removesuffix(".weight")
        made = case.quantize(rng, module, weight) if weight.ndim == 2 else None
        if made is None:
            stored[name] = weight
            values[name] = weight
            continue
        stored |= {f"{module}.{part}": np.array(a, order="C") for part, a in made.stored.items()}
        values[name] = made.values
        quantized.add(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config, **case.config}))
    metadata = {} if case.metadata is None else case.metadata(stored)
    save_file(stored, folder / "model.safetensors", metadata=metadata or None)
    return Written(
        folder=folder,
        stored=stored,
        twin=dataclasses.replace(model, tensors=values),
        quantized=frozenset(quantized),
        metadata=metadata,
    )


def is_linear(name: str) -> bool:
    """Whether a module is one of the layers' linears, which every tool quantises."""
    return ".self_attn." in name or ".mlp." in name


def packed(codes: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Codes `[..., K]` as a stream of bits along the last axis, lowest first, in whole bytes."""
    planes = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")
    stream = planes[..., :bits].reshape(*codes.shape[:-1], -1)
    return np.packbits(stream, axis=-1, bitorder="little")


def rounded_to_nearest(
    weight: Float32, bits: int, group: int, *, symmetric: bool, dtype: Any = np.float16
) -> tuple[Codes, Array, Codes]:
    """(codes `[N, K]`, scales `[N, G]`, zero points `[N, G]`) with `scale * (code - zero)` near the
    weight."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // group, group)
    top = (1 << bits) - 1
    low, high = groups.min(-1).clip(max=0), groups.max(-1).clip(min=0)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    scale = np.maximum((high - low) / top, 1e-4).astype(dtype)
    step = scale.astype(np.float32)
    zero = np.round(-low / step).clip(0, top)
    if symmetric:
        zero = np.full_like(zero, 1 << (bits - 1))
    codes = np.round(groups / step[..., None] + zero[..., None]).clip(0, top)
    return codes.astype(np.uint8).reshape(rows, columns), scale, zero.astype(np.uint8)


def scaled(codes: Array, scale: Array, zero: Array, group: int) -> Float32:
    """`scale * (code - zero)` in float64, rounded once."""
    wide = [np.repeat(part.astype(np.float64), group, axis=-1) for part in (scale, zero)]
    return (wide[0] * (codes.astype(np.float64) - wide[1])).astype(np.float32)
