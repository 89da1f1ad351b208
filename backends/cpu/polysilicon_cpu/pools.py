"""KV pages and adapter slots in the native library."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    AdapterPool,
    AdapterSpec,
    AdapterWeights,
    DeviceError,
    KVPool,
    KVSpec,
    Plane,
)
from polysilicon_cpu import library
from polysilicon_cpu.arrays import Array, address
from polysilicon_cpu.calls import PendingWork, closed_error

if TYPE_CHECKING:
    from polysilicon_cpu.device import CPUDevice

_STORAGES = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3}


class CPUKVPool(KVPool):
    """See native/kv.h for the layout."""

    def __init__(self, device: CPUDevice, spec: KVSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        self._device = device
        self._layer_places = {layer: place for place, layer in enumerate(spec.layers)}
        key, value = _keys_and_values(spec)
        layout = library.KVLayout(
            group=spec.group,
            layers=len(spec.layers),
            heads=key.heads,
            page_size=spec.page_size,
            window=spec.window or 0,
            key=library.KVPlane(dim=key.dim, storage=_STORAGES[key.dtype]),
            value=library.KVPlane(dim=value.dim, storage=_STORAGES[value.dtype]),
        )
        error = library.ErrorText()
        pointer = library.load().ps_kv_create(ctypes.byref(layout), pages, ctypes.byref(error))
        if not pointer:
            library.raise_error(error)
        self._pointer: int | None = pointer
        self.nbytes: int = library.load().ps_kv_bytes(pointer)
        self._finalizer = weakref.finalize(self, library.load().ps_kv_destroy, pointer)
        self._finalizer.atexit = False

    @property
    def pointer(self) -> int:
        """The native pool. Raises DeviceError when it is closed."""
        if self._pointer is None:
            raise closed_error(f"KV pool {self.spec.name!r}")
        return self._pointer

    def check_open(self) -> None:
        """Raise DeviceError when the pool or its device is closed."""
        assert self.pointer
        assert self._device.open_pointer()

    def layer_place(self, layer: int) -> int:
        """Which of the pool's layers it is."""
        if layer not in self._layer_places:
            raise ValueError(f"KV pool {self.spec.name!r} does not hold layer {layer}")
        return self._layer_places[layer]

    def copy(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        pointer, device = self.pointer, self._device.open_pointer()
        if len(source) != len(target):
            raise ValueError(f"copy of {len(source)} slots to {len(target)}")
        for slots in (source, target):
            _check_indexes("slots", slots, self.pages * self.spec.page_size)
        first, second = (np.ascontiguousarray(slots, np.int32) for slots in (source, target))
        ticket = library.load().ps_kv_copy(
            device, pointer, address(first), address(second), len(first)
        )
        self._device.in_flight.add(PendingWork(self._device, ticket, self))

    def read(self, pages: Sequence[int], into: npt.NDArray[np.uint8]) -> PendingWork:
        index = self._checked(pages, into)
        header = np.frombuffer(self.spec.block_header(), np.uint8)
        if not into.flags.c_contiguous:
            raise ValueError("pages are read into a C-contiguous array")
        into[..., : header.size] = header
        return self._transfer("ps_kv_read", index, into)

    def write(self, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> PendingWork:
        index = self._checked(pages, data)
        header = np.frombuffer(self.spec.block_header(), np.uint8)
        if not np.array_equal(
            data[..., : header.size], np.broadcast_to(header, (*data.shape[:2], header.size))
        ):
            raise ValueError(
                f"these KV blocks are not of group {self.spec.name!r}: their headers differ in "
                "version, layers, planes or dtypes; use blocks of the same model and KV dtype"
            )
        return self._transfer("ps_kv_write", index, np.ascontiguousarray(data))

    def close(self) -> None:
        if self._pointer is None:
            return
        self._device.finish()
        self.forget()

    def forget(self) -> None:
        """Free it; the device has ended what used it."""
        self._pointer = None
        self._finalizer()
        self.nbytes = 0

    def _transfer(self, function: str, index: npt.NDArray[np.int32], data: Array) -> PendingWork:
        spec = self.spec
        ticket = getattr(library.load(), function)(
            self._device.open_pointer(),
            self.pointer,
            address(index),
            len(index),
            address(data),
            spec.page_size // spec.block * spec.block_bytes,
            spec.block_bytes,
            len(spec.block_header()),
        )
        call = PendingWork(self._device, ticket, self, data)
        self._device.in_flight.add(call)
        return call

    def _checked(self, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        self.check_open()
        spec = self.spec
        shape = (len(pages), spec.page_size // spec.block, spec.block_bytes)
        if data.shape != shape or data.dtype != np.uint8:
            raise ValueError(f"canonical pages are uint8 {shape}, got {data.dtype} {data.shape}")
        index = np.asarray(pages, np.int64)
        _check_indexes("pages", index, self.pages)
        return index.astype(np.int32)


class CPUAdapterPool(AdapterPool):
    """See native/adapters.h."""

    def __init__(self, device: CPUDevice, spec: AdapterSpec, slots: int) -> None:
        self.spec = spec
        self.slots = slots
        self._device = device
        self._places = {name: place for place, name in enumerate(spec.targets)}
        targets = list(spec.targets.values())
        inputs = np.array([target.inputs for target in targets], np.int32)
        parts = np.array([len(target.outputs) for target in targets], np.int32)
        outputs = np.array([width for t in targets for width in t.outputs], np.int32)
        error = library.ErrorText()
        pointer = library.load().ps_adapters_create(
            len(targets), address(inputs), address(parts), address(outputs), slots,
            spec.max_rank, ctypes.byref(error),
        )  # fmt: skip
        if not pointer:
            library.raise_error(error)
        self._pointer: int | None = pointer
        self._sizes: dict[int, int] = {}
        self._finalizer = weakref.finalize(self, library.load().ps_adapters_destroy, pointer)
        self._finalizer.atexit = False

    @property
    def pointer(self) -> int:
        """The native pool. Raises DeviceError when it is closed."""
        if self._pointer is None:
            raise closed_error("the adapter pool")
        return self._pointer

    def check_open(self) -> None:
        """Raise DeviceError when the pool or its device is closed."""
        assert self.pointer
        assert self._device.open_pointer()

    @property
    def nbytes(self) -> int:
        """What the slots hold once every write that was submitted has ended."""
        return sum(self._sizes.values())

    def target_place(self, name: str) -> int:
        if name not in self._places:
            raise ValueError(f"the adapter pool has no target {name!r}")
        return self._places[name]

    def write(self, slot: int, weights: AdapterWeights) -> None:
        self._check_slot(slot)
        factors: list[library.AdapterFactors] = []
        kept: list[Array] = []
        for name, parts in weights.items():
            target = self.spec.targets.get(name)
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
                if rank > self.spec.max_rank:
                    raise ValueError(
                        f"adapter rank {rank} is above the pool's largest, {self.spec.max_rank}"
                    )
                kept += [down, up]
                factors.append(
                    library.AdapterFactors(
                        target=self._places[name], part=index, rank=rank,
                        down=address(down), up=address(up),
                    )
                )  # fmt: skip
        self._submit(slot, factors, kept)

    def clear(self, slot: int) -> None:
        self._check_slot(slot)
        self._submit(slot, [], [])

    def close(self) -> None:
        if self._pointer is None:
            return
        self._device.finish()
        self.forget()

    def forget(self) -> None:
        """Free it; the device has ended what used it."""
        self._pointer = None
        self._sizes = {}
        self._finalizer()

    def _submit(self, slot: int, factors: list[library.AdapterFactors], kept: list[Array]) -> None:
        table = (library.AdapterFactors * len(factors))(*factors)
        ticket = library.load().ps_adapters_write(
            self._device.open_pointer(), self.pointer, slot, table, len(factors)
        )
        self._sizes[slot] = sum(array.nbytes for array in kept)
        self._device.in_flight.add(PendingWork(self._device, ticket, self, kept))

    def _check_slot(self, slot: int) -> None:
        self.check_open()
        if not 0 < slot < self.slots:
            raise ValueError(f"adapter slots are 1..{self.slots - 1}, got {slot}")


def _keys_and_values(spec: KVSpec) -> tuple[Plane, Plane]:
    """The planes `k` and `v`; those of dtype int8 have their scales behind both."""
    key, value = spec.planes[:2]
    expected = [
        ("k", key.heads, key.dim, key.dtype),
        ("v", key.heads, value.dim, value.dtype),
        *((f"{p.name}_scale", key.heads, 1, "f32") for p in (key, value) if p.dtype == "int8"),
    ]
    if [(plane.name, plane.heads, plane.dim, plane.dtype) for plane in spec.planes] != expected:
        raise ValueError(
            "the cpu backend stores planes k and v of as many heads each, and the scales of those "
            "that are int8 (polysilicon.backend.kv_planes)"
        )
    return key, value


def _check_indexes(what: str, indexes: npt.NDArray[Any], limit: int) -> None:
    if indexes.size and (indexes.min() < 0 or indexes.max() >= limit):
        raise DeviceError(
            f"{what} must lie in 0..{limit - 1}, got {indexes.min()}..{indexes.max()}"
        )
