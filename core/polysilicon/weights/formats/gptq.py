"""GPTQ checkpoints, as AutoGPTQ, GPTQModel and AutoRound write them.

A linear of K inputs and N outputs is stored as int32 words, lowest bit first: `qweight`
`[K * bits / 32, N]`, each column a stream of the K codes of one output; `qzeros`
`[G, N * bits / 32]`, each row a stream of N zero points; `scales` `[G, N]`; and `g_idx` `[K]`, the
group of each input. An element is `scale * (code - zero)`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from polysilicon.errors import ModelError
from polysilicon.weights.encodings import Array, Weight, pack_codes, unpack_codes
from polysilicon.weights.files import TensorInfo, shown
from polysilicon.weights.formats.affine import (
    LEAST_GROUP,
    fitting_group,
    order_by_group,
    zero_point_weight,
)
from polysilicon.weights.formats.checks import SCALE_TYPES, finite, refuse, stored
from polysilicon.weights.formats.dense import as_stored
from polysilicon.weights.formats.format import LogicalTensor
from polysilicon.weights.formats.settings import Settings, expect_method, stated_settings
from polysilicon.weights.safetensors import SafetensorsDirectory

_BITS = (2, 3, 4, 8)
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
AUTO_ROUND = frozenset({"auto-round", "intel/auto-round"})
_METHODS = frozenset({"gptq", "gptq_v2"}) | AUTO_ROUND

_LAYOUTS = {
    "gptq": "gptq",
    "gptq_v2": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
"""What configs call the layouts, with the format that reads each."""

REFUSED_LAYOUTS = {
    "marlin": "codes are ordered for one kind of GPU",
    "bitblas": "codes are ordered for one kind of GPU",
    "gptq_p": "codes are split into planes of bits",
}
"""By what the config calls them, with why they are not read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Module:
    """One linear. groups: how many a row has."""

    name: str
    bits: int
    rows: int
    columns: int
    groups: int
    has_order: bool


class GPTQFormat:
    """stored_less: what zero points are less than meant: 1 in `gptq`, 0 in `gptq_v2`."""

    def __init__(self, name: str, *, stored_less: int) -> None:
        self.name = name
        self.encodings: Mapping[str, str] = {
            f"{name}:{bits}": f"affine:{bits}/128" for bits in _BITS
        }
        self._stored_less = stored_less

    def recognizes(self, files: SafetensorsDirectory) -> bool:
        settings = stated_settings(files)
        if settings is None or settings.method not in _METHODS:
            return False
        try:
            layout = stated_layout(settings)
        except ModelError:
            layout = ""
        # What nobody reads is refused by `gptq`.
        return _LAYOUTS.get(layout, "gptq") == self.name

    def open(self, files: SafetensorsDirectory) -> Mapping[str, LogicalTensor]:
        settings = expect_method(files, self.name, _METHODS)
        if settings is not None:
            _check_layout(settings)
        names = [n.removesuffix(".qweight") for n in files.tensors if n.endswith(".qweight")]
        if not names:
            raise ModelError(
                f"{files.path} has no tensor NAME.qweight, which {self.name} stores. "
                "Leave --quantization out, so that the format is found from the files."
            )
        modules = [_module(files, name, settings) for name in names]
        parts = {f"{name}.{part}" for name in names for part in _PARTS}
        tensors = as_stored(files, (name for name in files.tensors if name not in parts))
        for module in modules:
            info = self._info(files, module)
            if info.name in tensors:
                raise refuse(files, info.name, "is stored both plain and quantised")
            tensors[info.name] = LogicalTensor(
                info=info, read=functools.partial(self._read, files, module)
            )
        return tensors

    def _info(self, files: SafetensorsDirectory, module: _Module) -> TensorInfo:
        parts = (f"{module.name}.{part}" for part in _PARTS)
        return TensorInfo(
            name=f"{module.name}.weight",
            type=f"{self.name}:{module.bits}",
            shape=(module.rows, module.columns),
            nbytes=sum(files.tensors[part].nbytes for part in parts if part in files.tensors),
        )

    def _read(self, files: SafetensorsDirectory, module: _Module) -> Weight:
        words = files.array(f"{module.name}.qweight")
        codes = np.ascontiguousarray(words.T).view(np.uint8)
        group = module.columns // module.groups
        order = (
            order_by_group(files, f"{module.name}.g_idx", module.groups)
            if module.has_order
            else None
        )
        if order is not None:
            codes = unpack_codes(codes, module.bits, module.columns)
            codes = pack_codes(codes.take(order, axis=1), module.bits)
        scale = finite(files, f"{module.name}.scales")
        return zero_point_weight(
            shape=(module.rows, module.columns),
            bits=module.bits,
            group=group,
            codes=codes,
            scale=np.ascontiguousarray(scale.T),
            zeros=np.ascontiguousarray(self._zeros(files, module).T),
            input_order=order,
        )

    def _zeros(self, files: SafetensorsDirectory, module: _Module) -> Array:
        """Integers `[G, N]`."""
        words = files.array(f"{module.name}.qzeros")
        bits, less = module.bits, self._stored_less
        if 32 % bits == 0:
            # The writers subtract from whole words, so that what a zero point of 0 borrows of its
            # neighbour is given back only by adding to whole words.
            ones = sum(less << shift for shift in range(0, 32, bits))
            words = words.view(np.uint32) + np.uint32(ones)
            less = 0
        zeros = unpack_codes(words.view(np.uint8), bits, module.rows)
        return (zeros + np.uint8(less)) & np.uint8((1 << bits) - 1)


def stated_layout(settings: Settings) -> str:
    """What the config calls the layout, in lower case: `gptq` where it does not."""
    fields = settings.fields
    auto_round = settings.method in AUTO_ROUND
    for name in ("packing_format",) if auto_round else ("checkpoint_format", "format"):
        if fields.has(name):
            return fields.text(name).lower()
    if auto_round:
        return "auto_round:auto_gptq"
    return "marlin" if fields.flag("is_marlin_format", default=False) else "gptq"


def _check_layout(settings: Settings) -> None:
    layout = stated_layout(settings)
    reader = _LAYOUTS.get(layout, "")
    if not reader.startswith("gptq"):
        why = f"it is {reader}" if reader else REFUSED_LAYOUTS.get(layout, "it is not known")
        raise ModelError(
            f"{settings.fields.source} says that weights are laid out as {shown(layout)}, which is "
            f"not read: {why}. Use the checkpoint in the gptq or gptq_v2 layout."
        )


def _module(files: SafetensorsDirectory, name: str, settings: Settings | None) -> _Module:
    """One linear, held against the config: bits, inputs and group size follow from the shapes."""
    words, rows = stored(files, f"{name}.qweight", types=("I32",), shape=(None, None)).shape
    groups, _ = stored(files, f"{name}.scales", types=SCALE_TYPES, shape=(None, rows)).shape
    zeros = stored(files, f"{name}.qzeros", types=("I32",), shape=(groups, None))
    bits, rest = divmod(32 * zeros.shape[1], rows)
    if rest or bits not in _BITS:
        raise refuse(
            files,
            zeros.name,
            f"has {zeros.shape[1]} words a group, which are not {rows} codes of 2, 3, 4 or 8 bits",
        )
    columns, rest = divmod(32 * words, bits)
    if rest or columns % groups:
        raise refuse(
            files,
            f"{name}.qweight",
            f"has {words} words a column, which are not codes of {bits} bits in {groups} groups",
        )
    has_order = f"{name}.g_idx" in files.tensors
    if has_order:
        stored(files, f"{name}.g_idx", types=("I32", "I64"), shape=(columns,))
    group = columns // groups
    if fitting_group(columns, group) is None:
        raise refuse(
            files, f"{name}.scales", f"has groups of {group}; at least {LEAST_GROUP} are read"
        )
    if settings is not None:
        _check_stated(files, name, settings, bits, columns, group)
    return _Module(
        name=name, bits=bits, rows=rows, columns=columns, groups=groups, has_order=has_order
    )


def _check_stated(
    files: SafetensorsDirectory, name: str, settings: Settings, bits: int, columns: int, group: int
) -> None:
    """Hold a module against the config, unless that says otherwise of single modules."""
    fields = settings.fields
    if any(not fields.section(name).empty for name in ("dynamic", "extra_config")):
        return
    stated = fields.integer("bits", low=1, high=64, default=bits)
    size = fields.integer("group_size", low=-1, default=group)
    if (stated, size if size > 0 else columns) != (bits, group):
        raise refuse(
            files,
            f"{name}.qweight",
            f"has {bits} bits and groups of {group}, but {fields.source} says {stated} bits and "
            f"groups of {size}",
        )
