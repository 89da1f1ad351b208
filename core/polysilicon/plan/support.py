"""Which backends run a model's weights as they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polysilicon.backend import Capabilities
from polysilicon.format_matrix import Format, formats
from polysilicon.plan.model import PlannedModel
from polysilicon.weights.formats.format import CheckpointFormat


def encodings(model: PlannedModel) -> list[str]:
    """Encodings of a model's matrices, those of most bytes first."""
    nbytes: dict[str, int] = {}
    for tensor in model.tensors:
        if tensor.is_matrix:
            nbytes[tensor.encoding] = nbytes.get(tensor.encoding, 0) + tensor.nbytes
    return sorted(nbytes, key=lambda encoding: -nbytes[encoding])


def support(
    model: PlannedModel,
    backends: Mapping[str, Capabilities],
    *,
    added: Sequence[CheckpointFormat] = (),
) -> list[dict[str, Any]]:
    """For each encoding of the model's matrices: the rows of the format matrix that are read into
    it, and what each backend makes of it."""
    table = formats(added)
    return [
        {
            "encoding": encoding,
            "formats": [
                f"{item.container} {item.type}" for item in table if item.encoding == encoding
            ],
            "support": {
                name: str(Format(container="", type="", encoding=encoding).support(declared))
                for name, declared in backends.items()
            },
        }
        for encoding in encodings(model)
    ]


def described(model: PlannedModel, backends: Mapping[str, Capabilities]) -> str:
    """The backends with what they make of the worst of the model's encodings, such as `cpu native,
    metal transcoded`."""
    order = ("native", "transcoded", "refused")
    found = support(model, backends)
    worst = {
        name: max((item["support"][name] for item in found), key=order.index) for name in backends
    }
    return ", ".join(f"{name} {what}" for name, what in worst.items())
