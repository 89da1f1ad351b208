"""Which checkpoint formats run on which backend, from the readers' and devices' own words."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from polysilicon.backend import Capabilities
from polysilicon.weights import gguf_blocks
from polysilicon.weights.encodings import DENSE_DTYPES
from polysilicon.weights.formats.format import CheckpointFormat
from polysilicon.weights.formats.registry import FORMATS


class Support(enum.StrEnum):
    """native: placed as stored. transcoded: into another encoding at load. refused: not read."""

    NATIVE = "native"
    TRANSCODED = "transcoded"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A tensor type of a container. encoding: that it is read into, empty when it is not read."""

    container: str
    type: str
    encoding: str = ""

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
    read = [
        Format(container="gguf", type=kind.name, encoding=_gguf_encoding(kind))
        for kind in gguf_blocks.TENSOR_TYPES.values()
    ]
    read += [
        Format(container="safetensors", type=name, encoding=encoding)
        for format in (*FORMATS, *added)
        for name, encoding in format.encodings.items()
    ]
    removed = [Format(container="gguf", type=name) for name in gguf_blocks.REMOVED_TYPES.values()]
    return sorted(read + removed, key=lambda format: not format.encoding)


def _gguf_encoding(kind: gguf_blocks.TensorType) -> str:
    """The encoding of one decoded block."""
    if kind.name not in gguf_blocks.SUPPORTED_TYPES:
        return ""
    block = np.zeros(kind.size, np.uint8)
    return gguf_blocks.decode(block, kind, (1, kind.elements)).encoding
