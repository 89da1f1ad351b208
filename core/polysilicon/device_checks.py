"""What every device has to check of what it is given, written once for all of them.

A backend may import this module as it does `polysilicon.backend`. Each check raises what the
contract says, ValueError for what the core or a model gets wrong, with the sizes in question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    AdapterSpec,
    AdapterWeights,
    Capabilities,
    DeviceError,
    KVSpec,
    Shard,
    Weight,
)

Float32 = npt.NDArray[np.float32]


def check_parts(parts: Sequence[Weight], shard: Shard | None) -> None:
    """Parts that `Device.put` fuses: vectors, matrices or stacks that differ in their outputs only
    and divide among the shard's ranks."""
    if not parts:
        raise ValueError("put takes at least one part")
    outputs = -1 if len(parts[0].shape) == 1 else -2
    frames = {
        tuple(size for i, size in enumerate(part.shape) if i != len(part.shape) + outputs)
        for part in parts
    }
    if len(frames) > 1 or not 1 <= len(parts[0].shape) <= 3:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise ValueError(f"parts of one product differ in their outputs only, got {shapes}")
    if shard is None:
        return
    if outputs == -1 and shard.axis == "columns":
        raise ValueError("a vector has no columns to shard; place it whole, or by rows")
    for part in parts:
        size = part.shape[outputs if shard.axis == "rows" else -1]
        if size % shard.ranks:
            raise ValueError(f"{size} {shard.axis} do not divide among {shard.ranks} ranks")


def shard_window(size: int, axis: str, shard: Shard | None) -> tuple[int, int]:
    """Begin and end of what a shard holds of `size` rows or columns, which `check_parts` passed."""
    if shard is None or shard.axis != axis:
        return 0, size
    length = size // shard.ranks
    return shard.rank * length, (shard.rank + 1) * length


def check_kv_spec(spec: KVSpec, capabilities: Capabilities) -> None:
    """A pool that the core asks for."""
    if spec.page_size not in capabilities.page_sizes:
        raise ValueError(f"page size {spec.page_size} is not one of the device's")


def check_pages(
    spec: KVSpec, pages: Sequence[int], limit: int, blocks: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int64]:
    """The page ids, each below `limit`, for canonical `blocks` that are read or written."""
    shape = (len(pages), spec.page_size // spec.block, spec.block_bytes)
    if blocks.shape != shape or blocks.dtype != np.uint8:
        raise ValueError(f"canonical pages are uint8 {shape}, got {blocks.dtype} {blocks.shape}")
    index = np.asarray(pages, np.int64)
    check_indexes("pages", index, limit)
    return index


def check_block_headers(spec: KVSpec, blocks: npt.NDArray[np.uint8]) -> None:
    """Canonical blocks that are written: their headers are those of the pool's own."""
    header = np.frombuffer(spec.block_header(), np.uint8)
    if not (blocks[..., : header.size] == header).all():
        raise ValueError(
            f"these KV blocks are not of group {spec.name!r}: their headers differ in "
            "version, layers, planes or dtypes; use blocks of the same model and KV dtype"
        )


def check_adapter_spec(spec: AdapterSpec, slots: int, capabilities: Capabilities) -> None:
    """An adapter pool that the core asks for."""
    if slots > capabilities.adapters or spec.max_rank > capabilities.max_adapter_rank:
        raise ValueError(
            f"an adapter pool has at most {capabilities.adapters} slots of rank "
            f"{capabilities.max_adapter_rank}"
        )


def check_adapter_slot(slot: int, slots: int) -> None:
    """A slot that is written or cleared: slot 0 never is."""
    if not 0 < slot < slots:
        raise ValueError(f"adapter slots are 1..{slots - 1}, got {slot}")


def adapter_factors(
    spec: AdapterSpec, weights: AdapterWeights
) -> Iterator[tuple[str, int, Float32, Float32]]:
    """(target, part, A `[r, inputs]`, B `[outputs, r]`) of every part that an adapter changes, as
    contiguous copies."""
    for name, parts in weights.items():
        target = spec.targets.get(name)
        if target is None or len(parts) != len(target.outputs):
            raise ValueError(f"adapter target {name!r} is not one of the pool's")
        for index, (part, outputs) in enumerate(zip(parts, target.outputs, strict=True)):
            if part is None:
                continue
            down, up = (np.array(matrix, np.float32, order="C") for matrix in part)
            rank = down.shape[0]
            if down.shape != (rank, target.inputs) or up.shape != (outputs, rank):
                raise ValueError(
                    f"adapter target {name!r} takes A [r, {target.inputs}] and "
                    f"B [{outputs}, r], got {down.shape} and {up.shape}"
                )
            if rank > spec.max_rank:
                raise ValueError(
                    f"adapter rank {rank} is above the pool's largest, {spec.max_rank}"
                )
            yield name, index, down, up


def check_indexes(what: str, indexes: npt.NDArray[np.integer], limit: int) -> None:
    """Slots, pages or rows that a batch or a copy names. Raises DeviceError."""
    if indexes.size and (indexes.min() < 0 or indexes.max() >= limit):
        raise DeviceError(
            f"{what} must lie in 0..{limit - 1}, got {indexes.min()}..{indexes.max()}"
        )
