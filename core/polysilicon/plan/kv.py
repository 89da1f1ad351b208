"""How much KV fits: pages per group from a budget in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon.backend import KVSpec
from polysilicon.errors import ConfigError

MAX_SLOTS = (1 << 31) - 1
"""Slots of a pool are numbered in int32."""


def sequence_pages(spec: KVSpec, length: int, step_tokens: int) -> int:
    """Pages that one sequence of `length` tokens holds at most: all of them, or with a window those
    that it and one step's tokens span."""
    if spec.window is not None:
        length = min(length, spec.window + step_tokens + spec.page_size)
    return -(-length // spec.page_size)


def plan_pages(
    specs: Sequence[KVSpec],
    *,
    budget: int,
    max_sequences: int,
    max_length: int,
    step_tokens: int,
) -> tuple[int, ...]:
    """Pages of each group, page 0 included, for the longest total context that `budget` bytes hold.

    Groups with a window get what `max_sequences` sequences can hold, or as much context as the
    others where that is less. Raises ConfigError when the budget holds less than one sequence of
    one page.
    """

    def pages(context: int) -> tuple[int, ...]:
        return tuple(
            1
            + min(
                -(-context // spec.page_size),
                max_sequences * sequence_pages(spec, max_length, step_tokens),
            )
            for spec in specs
        )

    def size(context: int) -> int:
        return sum(
            count * spec.page_bytes for count, spec in zip(pages(context), specs, strict=True)
        )

    page = max(spec.page_size for spec in specs)
    low, high = 0, min(max_sequences * -(-max_length // page), MAX_SLOTS // page - 1)
    while low < high:
        middle = -(-(low + high) // 2)
        if size(middle * page) <= budget:
            low = middle
        else:
            high = middle - 1
    if not low:
        raise ConfigError(
            f"{budget:,} bytes of KV memory hold not even one page; the least is "
            f"{size(page):,}: raise --kv-memory"
        )
    return pages(low * page)


def context_capacity(specs: Sequence[KVSpec], pages: Sequence[int], step_tokens: int) -> int:
    """The longest sequence, in tokens, that these pages hold when it runs alone."""
    capacities = [
        (count - 1) * spec.page_size
        for spec, count in zip(specs, pages, strict=True)
        if spec.window is None or (count - 1) < sequence_pages(spec, 2**31, step_tokens)
    ]
    return min(capacities, default=2**31 - 1)
