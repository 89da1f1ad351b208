"""Writing a GGUF file of a model: which tensor gets which type, and what converters change."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polysilicon.quantization import k_quants
from polysilicon.quantization.gguf_encode import encode
from polysilicon.quantization.gguf_file import GGUFTensor, GGUFWriter
from polysilicon.quantization.gguf_metadata import gguf_metadata
from polysilicon.quantization.source import ModelSource, Unit
from polysilicon.weights import rtn
from polysilicon.weights.encodings import Float32, GroupAffine
from polysilicon.weights.gguf import NORMS_PLUS_ONE, ROWS_INTERLEAVED

GGUF_FORMATS = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 8,
    "q5_1": 9,
    "q8_0": 7,
    "q4_k": 14,
    "q5_k": 16,
    "q6_k": 18,
    "q4_k_m": 15,
    "q5_k_m": 17,
}
"""By the value of `--to`: `general.file_type`."""

_FITS: Mapping[str, rtn.Fit] = {
    "Q4_0": functools.partial(rtn.fit_symmetric, bits=4, group=32, dtype="f16", signed=True),
    "Q4_1": functools.partial(rtn.fit_affine, bits=4, group=32, dtype="f16"),
    "Q5_0": functools.partial(rtn.fit_symmetric, bits=5, group=32, dtype="f16", signed=True),
    "Q5_1": functools.partial(rtn.fit_affine, bits=5, group=32, dtype="f16"),
    "Q8_0": functools.partial(rtn.fit_symmetric, bits=8, group=32, dtype="f16"),
    "Q4_K": functools.partial(k_quants.fit_affine_blocks, bits=4),
    "Q5_K": functools.partial(k_quants.fit_affine_blocks, bits=5),
    "Q6_K": k_quants.fit_symmetric_blocks,
}
# For inputs that are no multiple of 256, as llama.cpp has it.
_WITHOUT_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def fit_of(kind: str) -> rtn.Fit:
    """How the grids of a ggml type are chosen."""
    return _FITS[kind]


def tensor_type(unit: Unit, kind: str, layers: int, *, tied: bool) -> str:
    """The ggml type of a unit in a file of `--to kind`.

    As llama.cpp has it: the output projection, or the table that is both, has Q6_K or better, and
    in a mix some of the values' and the down projections too: of the first and the last eighth of
    the layers, and of every third between them.
    """
    if not unit.linear:
        return "F32"
    base, module = kind.removesuffix("_m").upper(), unit.module
    if (module == "head" or (module == "embedding" and tied)) and base != "Q8_0":
        base = "Q6_K"
    elif kind.endswith("_m") and module in ("v", "down", "expert_down", "shared_down"):
        layer = int(unit.parts[0].key.split(".")[1])
        eighth = layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            base = "Q6_K"
    if base.endswith("_K") and unit.shape[-1] % k_quants.BLOCK:
        base = _WITHOUT_BLOCKS[base]
    return base if unit.shape[-1] % 32 == 0 else "F16"


class GGUFOutput:
    """An `Output` into a file."""

    def __init__(self, path: Path, source: ModelSource, kind: str) -> None:
        """Raises ModelError for a model whose metadata or tokenizer cannot be written."""
        self.notes: list[str] = []
        self._source = source
        config = source.config
        self._types = {
            name: tensor_type(unit, kind, config.layers, tied=config.tied_head)
            for name, unit in source.units.items()
        }
        metadata, extra = gguf_metadata(source, GGUF_FORMATS[kind])
        self._extra = extra
        self._architecture = str(metadata["general.architecture"])
        tensors = [
            GGUFTensor(name=name, shape=unit.shape, type=self._types[name])
            for name, unit in source.units.items()
        ]
        tensors += [
            GGUFTensor(name=name, shape=values.shape, type="F32") for name, values in extra.items()
        ]
        self._writer = GGUFWriter(path, metadata, tensors)
        self._note_fallbacks(kind)

    def _note_fallbacks(self, kind: str) -> None:
        base = kind.removesuffix("_m").upper()
        odd = [
            name
            for name, unit in self._source.units.items()
            if unit.linear and base.endswith("_K") and unit.shape[-1] % k_quants.BLOCK
        ]
        if odd:
            types = ", ".join(sorted({self._types[name] for name in odd}))
            self.notes.append(
                f"{len(odd)} matrices have inputs that blocks of {k_quants.BLOCK} do not divide, "
                f"and are {types} instead."
            )

    def fit(self, unit: Unit) -> rtn.Fit | None:
        return _FITS.get(self._types[unit.name])

    def quantized(self, unit: Unit, weight: GroupAffine) -> None:
        order = self._order(unit)
        if order is not None:
            taken = weight.take_rows(order)
            assert isinstance(taken, GroupAffine)
            weight = taken
        self._writer.write(unit.name, encode(weight, self._types[unit.name]).reshape(-1))

    def dense(self, unit: Unit, values: Float32) -> None:
        order = self._order(unit)
        if order is not None:
            values = values[order]
        if unit.name.endswith("norm.weight") and self._architecture in NORMS_PLUS_ONE:
            values = values + np.float32(1)
        kind = np.float16 if self._types[unit.name] == "F16" else np.float32
        self._writer.write(unit.name, np.ascontiguousarray(values, kind).reshape(-1).view(np.uint8))

    def _order(self, unit: Unit) -> npt.NDArray[np.int64] | None:
        """Rows of llama's and granite's q and k, as converters have them: those of a rotary pair,
        i and i + d / 2 of a head, become 2 i and 2 i + 1."""
        config = self._source.config
        module = unit.module
        if self._architecture not in ROWS_INTERLEAVED or module not in ("q", "k"):
            return None
        heads = config.heads if module == "q" else config.kv_heads
        rows = np.arange(unit.shape[0], dtype=np.int64)
        return rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)

    def close(self) -> None:
        for name, values in self._extra.items():
            data = np.ascontiguousarray(values, np.float32)
            self._writer.write(name, data.reshape(-1).view(np.uint8))
        self._writer.close()
