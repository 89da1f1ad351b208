"""KV memory: pages, the prefix cache and who holds what."""

from polysilicon.kv.groups import GroupSpec, GroupUsage
from polysilicon.kv.identity import page_identity, root_identity
from polysilicon.kv.manager import KVManager, SequenceKV, SlotCopy

__all__ = [
    "GroupSpec",
    "GroupUsage",
    "KVManager",
    "SequenceKV",
    "SlotCopy",
    "page_identity",
    "root_identity",
]
