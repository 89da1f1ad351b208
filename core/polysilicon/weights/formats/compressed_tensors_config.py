"""What a compressed-tensors config says: groups of modules, each with a scheme of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

from polysilicon.errors import ModelError
from polysilicon.weights.fields import Fields
from polysilicon.weights.files import shown
from polysilicon.weights.formats.targets import Matcher, Targets

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized",
    "mixed-precision",
)  # fmt: skip

REFUSED_LAYOUTS = {
    "marlin-24": "codes are ordered for one kind of GPU",
    "sparse-24-bitmask": "weights are sparse",
    "sparse-bitmask": "weights are sparse",
}
"""By what the config calls them, with why they are not read."""

_MOST_GROUPS = 256
_WHOLE, _ROW, _GROUPS, _BLOCKS = "tensor", "channel", ("group", "tensor_group"), "block"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the weights of a group's modules are stored.

    kind: `int` or `float`. group: inputs that share a scale, None for whole rows or more. block: of
    2-D blocks. single: whether a whole matrix shares one. static: whether activations have one
    symmetric scale from calibration.
    """

    targets: Targets
    kind: str
    bits: int
    symmetric: bool
    group: int | None
    block: tuple[int, int] | None
    single: bool
    static: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schemes:
    """All of a config. ignored: modules that stay as they are. source: for error messages."""

    schemes: tuple[Scheme, ...]
    ignored: Targets
    source: str

    def of(self, module: str) -> Scheme:
        """The scheme of a module that is quantised. A name goes before an expression, that before a
        class; where there is only one scheme, it is that of every module.

        Raises ModelError where none or several fit, and for modules that are to be left alone.
        """
        if self.ignored.name(module) or self.ignored.match(module):
            raise ModelError(
                f"{self.source} lists module {shown(module)} under ignore, but it is quantised. "
                "The config and the weights are not of one checkpoint: download both again."
            )
        if len(self.schemes) == 1:
            return self.schemes[0]
        for fits in (Targets.name, Targets.match, Targets.hold_class):
            found = [scheme for scheme in self.schemes if fits(scheme.targets, module)]
            if len(found) == 1:
                return found[0]
            if found:
                raise ModelError(
                    f"{self.source} has {len(found)} config_groups for module {shown(module)}. "
                    "Quantise the model with groups that do not overlap."
                )
        raise ModelError(
            f"{self.source} has no config_groups for module {shown(module)}, which is quantised. "
            "The config and the weights are not of one checkpoint: download both again."
        )


def read_schemes(fields: Fields, modules: Collection[str]) -> Schemes:
    """Read a config, for these modules. Raises ModelError for what is malformed and for what is not
    supported."""
    _check_format(fields)
    if fields.has("sparsity_config") and not fields.section("sparsity_config").empty:
        sparsity = fields.section("sparsity_config").text("format", default="dense")
        if sparsity != "dense":
            raise _unsupported(fields, f"the format {shown(sparsity)}", _why(sparsity))
    if fields.has("transform_config") and not fields.section("transform_config").empty:
        raise _unsupported(fields, "transforms of activations (transform_config)")
    groups, matcher = fields.section("config_groups"), Matcher(modules)
    schemes = []
    if len(groups.names) > _MOST_GROUPS:
        raise fields.refuse("config_groups", f"at most {_MOST_GROUPS} groups")
    for name in groups.names:
        if not groups.is_section(name):
            raise groups.refuse(name, "a mapping with targets and weights")
        group = groups.section(name)
        _check_format(group)
        # A group without weights says something of activations alone.
        if group.has("weights"):
            schemes.append(_scheme(group, matcher))
    if not schemes:
        raise ModelError(
            f"{fields.source} has no config_groups with weights, so that nothing says how they are "
            "quantised. Download the checkpoint again."
        )
    ignored = matcher.targets(fields, "ignore")
    return Schemes(schemes=tuple(schemes), ignored=ignored, source=fields.source)


def _check_format(fields: Fields) -> None:
    format = fields.text("format", default=_FORMATS[0])
    if format not in _FORMATS:
        raise _unsupported(fields, f"the format {shown(format)}", _why(format))


def _why(format: str) -> str:
    return REFUSED_LAYOUTS.get(format, "it is not known")


def _unsupported(fields: Fields, what: str, why: str = "") -> ModelError:
    reason = f": {why}" if why else ""
    return ModelError(
        f"{fields.source} has {what}, which is not read{reason}. "
        f"Use a checkpoint in one of {', '.join(_FORMATS)}."
    )


def _scheme(group: Fields, matcher: Matcher) -> Scheme:
    weights = group.section("weights")
    kind = weights.text("type", default="int").lower()
    bits = weights.integer("num_bits", low=1, high=64, default=8)
    if not (kind == "int" and 2 <= bits <= 8) and not (kind == "float" and bits in (4, 6, 8)):
        raise _unsupported(weights, f"weights of type {shown(kind)} of {bits} bits")
    symmetric = weights.flag("symmetric", default=True)
    if kind == "float" and not symmetric:
        raise _unsupported(weights, "zero points of floats")
    size = weights.integer("group_size", low=-1, default=-1)
    strategy = weights.text("strategy", default="").lower() or _implied_strategy(weights, size)
    if strategy not in (_WHOLE, _ROW, *_GROUPS, _BLOCKS):
        raise _unsupported(weights, f"the strategy {shown(strategy)}")
    grouped = strategy in _GROUPS
    if grouped and size < 1:
        raise weights.refuse("group_size", "an integer from 1 on")
    return Scheme(
        targets=matcher.targets(group, "targets"),
        kind=kind,
        bits=bits,
        symmetric=symmetric,
        group=size if grouped else None,
        block=_block(weights) if strategy == _BLOCKS else None,
        single=strategy == _WHOLE,
        static=_is_static(group),
    )


def _implied_strategy(weights: Fields, size: int) -> str:
    if size > 0:
        return _GROUPS[0]
    return _ROW if weights.has("group_size") else _WHOLE


def _block(weights: Fields) -> tuple[int, int]:
    """`[128, 128]`, or `128x128` as older versions have it."""
    if weights.is_text("block_structure"):
        words = weights.text("block_structure").split("x")
        sizes = [int(word) for word in words if re.fullmatch(r"\d{1,7}", word, re.ASCII)]
    else:
        sizes = weights.integers("block_structure", high=1 << 20)
    if len(sizes) != 2 or 0 in sizes:
        raise weights.refuse("block_structure", "a list of 2 integers from 1 on")
    return sizes[0], sizes[1]


def _is_static(group: Fields) -> bool:
    inputs = group.section("input_activations")
    return (
        not inputs.empty
        and not inputs.is_text("dynamic")
        and not inputs.flag("dynamic", default=False)
        and inputs.flag("symmetric", default=True)
    )
