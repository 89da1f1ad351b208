"""MXFP4 checkpoints, as OpenAI writes gpt-oss: the experts' stacks in 4-bit floats.

A stack `NAME` of E matrices of N outputs and K inputs is stored as `NAME_blocks` uint8
`[E, N, K / 32, 16]`, two e2m1 codes a byte with the lower half first, and `NAME_scales` uint8
`[E, N, K / 32]`, e8m0. An element is `2^(scale - 127) * decode(code)` (OCP Microscaling Formats
1.0). The weight that comes of it is `[E, N, K]`, where the unquantised model has `[E, K, N]`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Weight
from polysilicon.weights.files import TensorInfo
from polysilicon.weights.formats.checks import refuse, stored
from polysilicon.weights.formats.dense import as_stored
from polysilicon.weights.formats.floats import EXPONENT_TYPES, exponents, fp4_weight
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


class MXFP4Format:
    name = "mxfp4"
    encodings: Mapping[str, str] = {"mxfp4:e2m1": "float:f4_e2m1/32"}

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        return settings is not None and settings.method == self.name

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        expect_method(files, self.name, frozenset({self.name}))
        names = [n.removesuffix(_BLOCKS) for n in files.tensors if n.endswith(_BLOCKS)]
        if not names:
            raise ModelError(
                f"{files.path} has no tensor NAME{_BLOCKS}, which {self.name} stores. "
                "Leave --quantization out, so that the format is found from the files."
            )
        parts = {f"{name}{part}" for name in names for part in (_BLOCKS, _SCALES)}
        tensors = as_stored(files, (name for name in files.tensors if name not in parts))
        for name in names:
            if name in tensors:
                raise refuse(files, name, "is stored both plain and quantised")
            tensors[name] = LogicalTensor(
                info=_info(files, name), read=functools.partial(_read, files, name)
            )
        return tensors


def _info(files: SafetensorsDirectory, name: str) -> TensorInfo:
    """The stack's description, its stored parts checked. A plain matrix may stand for a stack."""
    blocks = stored(files, f"{name}{_BLOCKS}", types=("U8",))
    *rows, groups, nbytes = blocks.shape if len(blocks.shape) in (3, 4) else (0, 0, 0)
    if nbytes != _GROUP // 2:
        raise refuse(
            files,
            blocks.name,
            f"has shape {list(blocks.shape)}, expected [experts, outputs, inputs / 32, 16]",
        )
    scales = stored(files, f"{name}{_SCALES}", types=EXPONENT_TYPES, shape=(*rows, groups))
    return TensorInfo(
        name=name,
        type="mxfp4:e2m1",
        shape=(*rows, groups * _GROUP),
        nbytes=blocks.nbytes + scales.nbytes,
    )


def _read(files: SafetensorsDirectory, name: str) -> Weight:
    blocks = files.array(f"{name}{_BLOCKS}")
    return fp4_weight(blocks.reshape(*blocks.shape[:-2], -1), exponents(files, f"{name}{_SCALES}"))
