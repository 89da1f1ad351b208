"""Which checkpoint formats run on which backend, from the readers' and devices' own words."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from polysilicon.backend import Capabilities
from polysilicon.models.stacking import FEW_BITS
from polysilicon.weights import gguf_blocks
from polysilicon.weights.encodings import DENSE_DTYPES
from polysilicon.weights.formats.format import CheckpointFormat
from polysilicon.weights.formats.registry import FORMATS, REFUSED


class Support(enum.StrEnum):
    """native: placed as stored. transcoded: into another encoding at load. refused: not read."""

    NATIVE = "native"
    TRANSCODED = "transcoded"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A tensor type of a container. encoding: that it is read into, empty when it is not read.
    reason: why it is not. note: what is held otherwise, in words."""

    container: str
    type: str
    encoding: str = ""
    reason: str = ""
    note: str = ""

    def support(self, capabilities: Capabilities) -> Support:
        """What a device with these capabilities makes of it."""
        if not self.encoding:
            return Support.REFUSED
        if capabilities.takes(self.encoding):
            return Support.NATIVE
        # Every encoding dequantises, so a device that takes any dense one runs it.
        dense = any(capabilities.takes(f"dense:{dtype}") for dtype in DENSE_DTYPES)
        return Support.TRANSCODED if dense else Support.REFUSED


def formats(added: Sequence[CheckpointFormat] = ()) -> list[Format]:
    """Every tensor type that the readers know, those that they refuse last.

    added: checkpoint formats of plugins.
    """
    found = [_gguf(kind) for kind in gguf_blocks.TENSOR_TYPES.values()]
    found += [
        Format(
            container="safetensors", type=name, encoding=encoding, note=_note(format.name, encoding)
        )
        for format in (*FORMATS, *added)
        for name, encoding in format.encodings.items()
    ]
    found += [
        Format(container="safetensors", type=name, reason=reason)
        for name, reason in REFUSED.items()
    ]
    found += [
        Format(container="gguf", type=name, reason="ggml took it back")
        for name in gguf_blocks.REMOVED_TYPES.values()
    ]
    return sorted(found, key=lambda format: not format.encoding)


_MAY_HAVE_ACT_ORDER = frozenset({"gptq", "gptq_v2", "compressed-tensors"})


def _note(format: str, encoding: str) -> str:
    """How experts are held of which each has an order of inputs of its own."""
    if format not in _MAY_HAVE_ACT_ORDER or not encoding.startswith("affine:"):
        return ""
    few = int(encoding.removeprefix("affine:").split("/")[0]) <= FEW_BITS
    held = "8 bits in groups of 32" if few else "16 bits"
    return f"experts in act-order: gate and up projections are held in {held}"


def _gguf(kind: gguf_blocks.TensorType) -> Format:
    """A type of GGUF, with the encoding of one decoded block."""
    if kind.name not in gguf_blocks.SUPPORTED_TYPES:
        return Format(container="gguf", type=kind.name, reason="no type of stored weights")
    block = np.zeros(kind.size, np.uint8)
    encoding = gguf_blocks.decode(block, kind, (1, kind.elements)).encoding
    return Format(container="gguf", type=kind.name, encoding=encoding)
