"""AWQ checkpoints, as AutoAWQ and AutoRound write them: 4-bit codes in words, with zero points.

`gemm`: `qweight` `[K, N / 8]` and `qzeros` `[G, N / 8]` hold eight outputs a word, `scales` is
`[G, N]`. `gemv`: `qweight` `[N, K / 8]` holds eight inputs a word, `qzeros` `[N, Z]` eight groups,
`scales` `[N, 8 Z]`, both padded. An element is `scale * (code - zero)`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Array, Weight, unpack_codes
from polysilicon.weights.files import TensorInfo, shown
from polysilicon.weights.formats.affine import LEAST_GROUP, fitting_group, zero_point_weight
from polysilicon.weights.formats.checks import SCALE_TYPES, finite, refuse, stored
from polysilicon.weights.formats.dense import as_stored
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.gptq import AUTO_ROUND, stated_layout
from polysilicon.weights.formats.settings import Settings, expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

_BITS = 4
_PARTS = ("qweight", "qzeros", "scales")
_GEMM, _GEMV = "gemm", "gemv"

REFUSED_LAYOUTS = {
    "gemv_fast": "codes are ordered for one kind of GPU",
    "llm-awq": "codes are ordered for one kind of GPU",
}
"""By what the config calls them, with why they are not read."""

# The halves of a byte in which `gemm` keeps outputs 0 to 7 of a word.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Module:
    """One linear. groups: how many a row has."""

    name: str
    layout: str
    rows: int
    columns: int
    groups: int


class AWQFormat:
    name = "awq"
    encodings: Mapping[str, str] = {"awq:4": "affine:4/128"}

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        if settings is None:
            return False
        return settings.method == self.name or _is_auto_round(settings)

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        settings = expect_method(files, self.name, AUTO_ROUND | {self.name})
        layout = _GEMM if settings is None else _layout(settings)
        names = [n.removesuffix(".qweight") for n in files.tensors if n.endswith(".qweight")]
        if not names:
            raise ModelError(
                f"{files.path} has no tensor NAME.qweight, which {self.name} stores. "
                "Leave --quantization out, so that the format is found from the files."
            )
        parts = {f"{name}.{part}" for name in names for part in _PARTS}
        tensors = as_stored(files, (name for name in files.tensors if name not in parts))
        for name in names:
            if layout == _GEMM:
                module = _gemm_module(files, name, settings)
            else:
                module = _gemv_module(files, name, settings)
            info = TensorInfo(
                name=f"{name}.weight",
                type=f"{self.name}:{_BITS}",
                shape=(module.rows, module.columns),
                nbytes=sum(files.tensors[f"{name}.{part}"].nbytes for part in _PARTS),
            )
            if info.name in tensors:
                raise refuse(files, info.name, "is stored both plain and quantised")
            tensors[info.name] = LogicalTensor(
                info=info, read=functools.partial(_read, files, module)
            )
        return tensors


def _is_auto_round(settings: Settings) -> bool:
    """Whether AutoRound wrote the config, and this layout."""
    try:
        return settings.method in AUTO_ROUND and stated_layout(settings) == "auto_round:auto_awq"
    except ModelError:
        return False


def _layout(settings: Settings) -> str:
    """`gemm` or `gemv`. Raises ModelError for the others and for anything but 4 bits."""
    fields = settings.fields
    if settings.method in AUTO_ROUND and not _is_auto_round(settings):
        raise fields.refuse("packing_format", "auto_round:auto_awq")
    bits = fields.integer("w_bit" if fields.has("w_bit") else "bits", low=1, high=64, default=_BITS)
    if bits != _BITS:
        raise ModelError(
            f"{fields.source} says {bits} bits, but AWQ is read with {_BITS}. "
            "Use a 4-bit checkpoint, or one in the gptq layout."
        )
    if not fields.flag("zero_point", default=True):
        raise ModelError(
            f"{fields.source} says that there are no zero points, which is not supported. "
            "Quantise the model with zero_point."
        )
    layout = "llm-awq" if fields.text("backend", default="") == "llm-awq" else ""
    layout = (
        layout
        or fields.text("version" if fields.has("version") else "format", default=_GEMM).lower()
    )
    if layout not in (_GEMM, _GEMV):
        raise ModelError(
            f"{fields.source} says that weights are laid out as {shown(layout)}, which is not "
            f"read: {REFUSED_LAYOUTS.get(layout, 'it is not known')}. "
            f"Use the checkpoint in the {_GEMM} or {_GEMV} layout."
        )
    return layout


def _stated_group(settings: Settings | None, columns: int) -> int | None:
    """The group size that the config says, None where it says nothing."""
    if settings is None:
        return None
    fields = settings.fields
    name = "q_group_size" if fields.has("q_group_size") else "group_size"
    if not fields.has(name):
        return None
    size = fields.integer(name, low=-1)
    return size if size > 0 else columns


def _gemm_module(files: SafetensorsDirectory, name: str, settings: Settings | None) -> _Module:
    columns, words = stored(files, f"{name}.qweight", types=("I32",), shape=(None, None)).shape
    rows = 8 * words
    groups, _ = stored(files, f"{name}.scales", types=SCALE_TYPES, shape=(None, rows)).shape
    stored(files, f"{name}.qzeros", types=("I32",), shape=(groups, words))
    group, rest = divmod(columns, groups)
    if rest or columns % 2:
        raise refuse(files, f"{name}.scales", f"has {groups} groups for {columns} inputs")
    if group != (_stated_group(settings, columns) or group):
        raise refuse(
            files, f"{name}.scales", f"has groups of {group}, which is not what the config says"
        )
    _check_group(files, name, columns, group)
    return _Module(name=name, layout=_GEMM, rows=rows, columns=columns, groups=groups)


def _gemv_module(files: SafetensorsDirectory, name: str, settings: Settings | None) -> _Module:
    rows, words = stored(files, f"{name}.qweight", types=("I32",), shape=(None, None)).shape
    columns = 8 * words
    _, width = stored(files, f"{name}.qzeros", types=("I32",), shape=(rows, None)).shape
    stored(files, f"{name}.scales", types=SCALE_TYPES, shape=(rows, 8 * width))
    group = _stated_group(settings, columns)
    if group is None:
        raise ModelError(
            f"{files.path} says nowhere which group size it has. Use a checkpoint with its "
            "quantization_config."
        )
    if columns % group or columns // group > 8 * width:
        raise refuse(
            files, f"{name}.scales", f"has no whole groups of {group} for {columns} inputs"
        )
    _check_group(files, name, columns, group)
    return _Module(name=name, layout=_GEMV, rows=rows, columns=columns, groups=columns // group)


def _check_group(files: SafetensorsDirectory, name: str, columns: int, group: int) -> None:
    if fitting_group(columns, group) is None:
        raise refuse(
            files, f"{name}.scales", f"has groups of {group}; at least {LEAST_GROUP} are read"
        )


def _read(files: SafetensorsDirectory, module: _Module) -> Weight:
    words, zero_words = (files.array(f"{module.name}.{part}") for part in ("qweight", "qzeros"))
    scale = finite(files, f"{module.name}.scales")
    if module.layout == _GEMM:
        codes = _packed_outputs(words)
        halves = unpack_codes(zero_words.view(np.uint8), _BITS, module.rows)
        halves = halves.reshape(module.groups, -1, 8)[..., _PLACES]
        zeros = np.ascontiguousarray(halves.reshape(module.groups, -1).T)
        scale = np.ascontiguousarray(scale.T)
    else:
        codes = words.view(np.uint8)
        zeros = unpack_codes(zero_words.view(np.uint8), _BITS, module.groups)
        scale = np.ascontiguousarray(scale[:, : module.groups])
    return zero_point_weight(
        shape=(module.rows, module.columns),
        bits=_BITS,
        group=module.columns // module.groups,
        codes=codes,
        scale=scale,
        zeros=zeros,
    )


def _packed_outputs(words: Array) -> npt.NDArray[np.uint8]:
    """Codes of outputs as pairs of inputs, uint8 `[N, K / 2]`, of `gemm` words `[K, N / 8]`."""
    columns, width = words.shape
    packed = np.empty((width, 8, columns // 2), np.uint8)
    for output, place in enumerate(_PLACES):
        codes = (words >> np.int32(_BITS * place)).astype(np.uint8) & np.uint8(15)
        packed[:, output] = (codes[0::2] | codes[1::2] << np.uint8(4)).T
    return packed.reshape(8 * width, columns // 2)
