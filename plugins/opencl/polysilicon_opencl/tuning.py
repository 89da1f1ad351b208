"""Shapes of work-groups, by what a device says of itself."""

from __future__ import annotations

import dataclasses

import pyopencl as cl

from polysilicon_opencl.discovery import kind_of

_CPU_LOCAL_BYTES = 192 << 10
"""Of a processor's "local memory", which is its cache: what an attention work-group may take."""

_GPU_LOCAL_BYTES = 32 << 10
"""OpenCL's least; taking no more lets several work-groups share a compute unit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """lanes: work-items of a work-group that share a result, a power of 2; 1 where a work-item
    uses vector registers instead.
    panels: products of many rows by panels in the cache, not by tiles in local memory.
    side: of a square of work-items that makes a tile.
    few_rows: the most rows for which products go row by row.
    outputs: of a product of one row that a work-group makes at a time; of several rows it makes
        half as many, for `tokens` of them.
    rounds: how often it does so, at most; less where that leaves fewer than `enough_groups`.
    segment: columns that a work-group of an element-wise kernel makes.
    chunk: keys that attention looks at together, a multiple of 16.
    queries: tokens that an attention work-group of a prefill takes.
    attention_groups: work-groups that a decode is to have, by sharing each context among several,
        as long as each gets `split_context` tokens.
    attention_rows: query rows that one takes at most. local_bytes: of local memory, at most.
    vector: width of its vectors.
    """

    lanes: int
    panels: bool
    side: int
    few_rows: int
    outputs: int
    tokens: int
    rounds: int
    enough_groups: int
    segment: int
    chunk: int
    queries: int
    attention_groups: int
    split_context: int
    attention_rows: int
    local_bytes: int
    vector: int


def choose(device: cl.Device, shapes: str) -> Tuning:
    """The shapes for a device; `shapes` as in `Options`."""
    units = int(device.max_compute_units)
    if shapes == "cpu" or (shapes == "auto" and kind_of(device) == "CPU"):
        return Tuning(
            lanes=1,
            panels=True,
            side=1,
            few_rows=7,
            outputs=8,
            tokens=4,
            rounds=4,
            enough_groups=8 * units,
            segment=4096,
            chunk=64,
            queries=4,
            attention_groups=4 * units,
            split_context=256,
            attention_rows=12,
            local_bytes=min(device.local_mem_size, _CPU_LOCAL_BYTES),
            vector=16,
        )
    limit = int(device.max_work_group_size)
    lanes = _power_of_two(min(64, limit))
    return Tuning(
        lanes=lanes,
        panels=False,
        side=16 if limit >= 256 else 8 if limit >= 64 else 1,
        few_rows=7,
        outputs=4,
        tokens=2,
        rounds=1,
        enough_groups=1,
        segment=16 * lanes,
        chunk=lanes if lanes >= 16 else 16,
        queries=4,
        attention_groups=4 * units,
        split_context=256,
        attention_rows=8,
        local_bytes=min(device.local_mem_size, _GPU_LOCAL_BYTES),
        vector=4,
    )


def _power_of_two(number: int) -> int:
    """The largest that is not above."""
    return 1 << (number.bit_length() - 1)
