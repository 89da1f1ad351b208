"""Writing a directory as Hugging Face has it, with quantised safetensors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polysilicon.errors import ConfigError
from polysilicon.quantization.hf_config_writer import hf_config
from polysilicon.quantization.hf_tokenizer import write_tokenizer
from polysilicon.quantization.layouts import LAYOUTS
from polysilicon.quantization.safetensors_file import SafetensorsWriter
from polysilicon.quantization.source import ModelSource, Unit
from polysilicon.weights import rtn
from polysilicon.weights.checkpoint import SafetensorsCheckpoint
from polysilicon.weights.encodings import DENSE_DTYPES, Float32, GroupAffine
from polysilicon.weights.gguf import GGUFFile

# Beside config.json and the weights, what belongs to a model and stays as it is.
_CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "LICENSE",
)
_STATED_BEFORE = ("quantization", "quantization_config", "compression_config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grids:
    """How many bits, and how many elements share a scale."""

    bits: int
    group: int


def choose_grids(source: ModelSource, layout: str, bits: int | None, group: int | None) -> Grids:
    """The bits and the group asked for, or the layout's first that fit every matrix.

    Raises ConfigError for those that the layout does not have or that a matrix does not fit.
    """
    kind = LAYOUTS[layout]
    bits = kind.bits[0] if bits is None else bits
    if bits not in kind.bits:
        known = ", ".join(map(str, sorted(kind.bits)))
        raise ConfigError(f"--to {layout} has {known} bits, not {bits}: choose --bits of these")
    units = [
        unit for unit in source.units.values() if unit.linear and (kind.tables or not unit.table)
    ]
    common = functools.reduce(math.gcd, (unit.shape[-1] for unit in units), 0)
    fitting = [size for size in kind.groups if common % size == 0]
    if group is not None and group not in kind.groups:
        known = ", ".join(map(str, sorted(kind.groups)))
        raise ConfigError(f"--to {layout} has groups of {known}, not {group}: choose one of these")
    if not fitting or group not in (None, *fitting):
        mend = (
            f"choose --group {fitting[0]}" if fitting else "write GGUF instead, such as --to q8_0"
        )
        asked = group or min(kind.groups)
        odd = next(unit for unit in units if unit.shape[-1] % asked)
        raise ConfigError(
            f"{odd.name} has {odd.shape[-1]} inputs, which groups of {asked} do not divide: {mend}"
        )
    for unit in units:
        if unit.shape[-2] % kind.rows:
            raise ConfigError(
                f"{unit.name} has {unit.shape[-2]} outputs, and --to {layout} packs {kind.rows} "
                "into a word: choose --to compressed-tensors"
            )
    return Grids(bits=bits, group=fitting[0] if group is None else group)


class DirectoryOutput:
    """An `Output` into an existing, empty directory."""

    def __init__(self, directory: Path, source: ModelSource, layout: str, grids: Grids) -> None:
        """Raises ModelError for a GGUF model that config.json cannot describe."""
        self.notes: list[str] = []
        self._directory = directory
        self._source = source
        self._layout = LAYOUTS[layout]
        self._grids = grids
        self._dtype = source.dense_dtype
        self._writer = SafetensorsWriter(directory, dict(self._layout.metadata))
        self._dense_linears: list[str] = []
        self._stated = self._config()

    def fit(self, unit: Unit) -> rtn.Fit | None:
        if not unit.linear or (unit.table and not self._layout.tables):
            return None
        fit = {
            "symmetric": rtn.fit_symmetric,
            "zero_point": rtn.fit_zero_point,
            "affine": rtn.fit_affine,
        }[self._layout.grid]
        return functools.partial(
            fit, bits=self._grids.bits, group=self._grids.group, dtype=self._dtype
        )

    def quantized(self, unit: Unit, weight: GroupAffine) -> None:
        module = unit.name.removesuffix(".weight")
        for name, array in self._layout.pack(weight).items():
            self._writer.add(f"{module}.{name}", array)

    def dense(self, unit: Unit, values: Float32) -> None:
        if unit.name.endswith(".weight") and len(unit.shape) > 1 and unit.module != "embedding":
            self._dense_linears.append(unit.name.removesuffix(".weight"))
        self._writer.add(unit.name, _narrow(values, self._dtype))

    def close(self) -> None:
        self._writer.close()
        config = self._stated
        for key in _STATED_BEFORE:
            config.pop(key, None)
        config["torch_dtype"] = {"f16": "float16", "bf16": "bfloat16"}[self._dtype]
        config.pop("dtype", None)
        linear = list(self._dense_linears)
        if not self._layout.tables and self._source.head not in linear:
            # A tied projection has no tensor, but tools look for one where it is not named.
            linear.append(self._source.head)
        config |= self._layout.settings(self._grids.bits, self._grids.group, linear)
        _write_json(self._directory / "config.json", config)

    def _config(self) -> dict[str, Any]:
        checkpoint = self._source.checkpoint
        if isinstance(checkpoint, GGUFFile):
            self.notes += write_tokenizer(checkpoint, self._directory)
            return hf_config(self._source)
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        for name in _CARRIED:
            path = checkpoint.path / name
            if path.is_file():
                shutil.copyfile(path, self._directory / name)
        return dict(checkpoint.config)


def _narrow(values: Float32, dtype: str) -> np.ndarray[Any, Any]:
    largest = np.abs(values).max(initial=0.0)
    if dtype == "f16" and largest > np.finfo(np.float16).max:
        return values
    return values.astype(DENSE_DTYPES[dtype])


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # Half a surrogate pair, which no UTF-8 spells, becomes JSON's escape again.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
