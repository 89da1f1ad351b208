"""KV groups as their owner declares them, and what the manager reports of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polysilicon.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One KV group: the layers that share a retention rule.

    `pages` counts the pool's pages, page 0 included. `window` is in tokens, None for full
    attention: a query at position p attends to positions greater than p - window.
    """

    name: str
    pages: int
    window: int | None


@dataclass(frozen=True, kw_only=True)
class GroupUsage:
    """Where the pages of one group are: `total` is the sum of the others, page 0 left out.

    `cached` pages are held by the prefix cache alone and can be evicted; pages in `limbo` become
    free when the steps that may still touch them have ended.
    """

    name: str
    total: int
    free: int
    cached: int
    in_use: int
    limbo: int


def check_sizes(
    groups: Sequence[GroupSpec], page_size: int, max_sequences: int, max_length: int
) -> None:
    """Raises ConfigError, naming the mend, for groups and sizes that cannot work."""
    if not groups:
        raise ConfigError(
            "the model declares no KV group; a model definition must name at least one"
        )
    if len({group.name for group in groups}) < len(groups):
        raise ConfigError(
            "two KV groups have the same name; a model definition must tell them apart"
        )
    for name, value in (
        ("page size", page_size),
        ("number of sequences", max_sequences),
        ("maximum length", max_length),
    ):
        if value < 1:
            raise ConfigError(f"the {name} is {value}; it must be at least 1")
    for group in groups:
        if group.pages < 2:
            raise ConfigError(
                f"KV group {group.name!r} has {group.pages} pages and one of them is for padding; "
                "give the KV cache more memory or use a smaller page size"
            )
        if group.window is not None and group.window < 1:
            raise ConfigError(
                f"KV group {group.name!r} has a window of {group.window} tokens; "
                "it must be at least 1"
            )
