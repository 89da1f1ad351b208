"""What each thing that a plugin supplies is held to, and why one is turned away."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence

from polysilicon.backend import CONTRACT_VERSION, Backend
from polysilicon.executor import ExecutorProvider
from polysilicon.models.architecture import Architecture
from polysilicon.weights.formats.format import CheckpointFormat
from polysilicon.weights.formats.registry import AUTO, FORMATS

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


class PluginStatus(enum.StrEnum):
    """What became of a plugin."""

    LOADED = "loaded"
    FAILED = "failed"
    BLOCKED = "blocked"
    DUPLICATE = "duplicate"
    INCOMPATIBLE = "incompatible"
    MISSING = "missing"


class RejectedError(Exception):
    """A plugin that cannot be used; the message is its record's reason."""

    def __init__(self, status: PluginStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def check_backend(item: object) -> Backend:
    if isinstance(item, type) or not isinstance(item, Backend):
        raise RejectedError(
            PluginStatus.FAILED,
            f"polysilicon_backends returned {_kind(item)}, which is not an object with name, "
            "contract, priority, probe() and open()",
        )
    _check_name("backend", item.name, reserved=("auto",))
    if not isinstance(item.priority, int):
        raise RejectedError(
            PluginStatus.FAILED, f"the priority of backend {item.name!r} is not an int"
        )
    _check_contract(f"backend {item.name!r}", item.contract)
    return item


def check_executor(item: object) -> ExecutorProvider:
    if isinstance(item, type) or not isinstance(item, ExecutorProvider):
        raise RejectedError(
            PluginStatus.FAILED,
            f"polysilicon_executors returned {_kind(item)}, which is not an object with name, "
            "contract, formats, probe() and open()",
        )
    _check_name("executor", item.name, reserved=("auto", "native"))
    if not (isinstance(item.formats, frozenset) and all(type(f) is str for f in item.formats)):
        raise RejectedError(
            PluginStatus.FAILED,
            f"the formats of executor {item.name!r} are {item.formats!r:.80}, not a frozenset of "
            "names",
        )
    _check_contract(f"executor {item.name!r}", item.contract)
    return item


def _check_name(kind: str, name: object, *, reserved: Sequence[str]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in reserved:
        raise RejectedError(
            PluginStatus.FAILED,
            f"{kind} name {name!r} is not valid: lower-case letters, digits, - and _, "
            f"at most 32, and not {' or '.join(map(repr, reserved))}",
        )


def _check_contract(owner: str, contract: object) -> None:
    """owner: the backend or executor, for messages."""
    if not (
        isinstance(contract, tuple)
        and len(contract) == 2
        and all(type(part) is int for part in contract)
    ):
        raise RejectedError(
            PluginStatus.FAILED,
            f"the contract of {owner} is {contract!r}, not (major, minor)",
        )
    major, minor = CONTRACT_VERSION
    if contract[0] == major and contract[1] <= minor:
        return
    mend = (
        "upgrade polysilicon (pip install -U polysilicon)"
        if contract > CONTRACT_VERSION
        else "upgrade the plugin, or install an older polysilicon"
    )
    raise RejectedError(
        PluginStatus.INCOMPATIBLE,
        f"{owner} is built for contract {contract[0]}.{contract[1]}, "
        f"this polysilicon has {major}.{minor}: {mend}",
    )


def check_architecture(item: object) -> Architecture:
    if not isinstance(item, Architecture):
        raise RejectedError(
            PluginStatus.FAILED,
            f"polysilicon_architectures returned {_kind(item)}, not an Architecture",
        )
    return item


def check_format(item: object) -> CheckpointFormat:
    if isinstance(item, type) or not isinstance(item, CheckpointFormat):
        raise RejectedError(
            PluginStatus.FAILED,
            f"polysilicon_checkpoint_formats returned {_kind(item)}, which is not an object with "
            "name, encodings, recognizes() and open()",
        )
    _check_name("checkpoint format", item.name, reserved=(AUTO,))
    if item.name in {format.name for format in FORMATS}:
        raise RejectedError(
            PluginStatus.DUPLICATE,
            f"checkpoint format {item.name!r} is one of polysilicon's own: take another name",
        )
    encodings = item.encodings
    if not isinstance(encodings, Mapping) or not all(
        isinstance(text, str) for pair in encodings.items() for text in pair
    ):
        raise RejectedError(
            PluginStatus.FAILED,
            f"the encodings of checkpoint format {item.name!r} are {encodings!r:.80}, not a "
            "mapping of types to encodings",
        )
    return item


def _kind(item: object) -> str:
    return f"the class {item.__name__}" if isinstance(item, type) else f"a {type(item).__name__}"
