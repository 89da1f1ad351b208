"""KV pages and adapter slots in the native library."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    KV_LARGEST_CODE,
    AdapterPool,
    AdapterSpec,
    AdapterWeights,
    KVPool,
    KVSpec,
    Plane,
)
from polysilicon.device_checks import (
    adapter_factors,
    check_adapter_slot,
    check_block_headers,
    check_indexes,
    check_pages,
)
from polysilicon_cpu import library
from polysilicon_cpu.arrays import Array, address
from polysilicon_cpu.calls import PendingWork, closed_error

if TYPE_CHECKING:
    from polysilicon_cpu.device import CPUDevice

_STORAGES = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3, "fp8_e4m3": 4}


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
        pointer = library.load().ps_kv_create(
            device.open_pointer(), ctypes.byref(layout), pages, ctypes.byref(error)
        )
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
            check_indexes("slots", slots, self.pages * self.spec.page_size)
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
        check_block_headers(self.spec, data)
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
        return check_pages(self.spec, pages, self.pages, data).astype(np.int32)


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
        for name, index, down, up in adapter_factors(self.spec, weights):
            kept += [down, up]
            factors.append(
                library.AdapterFactors(
                    target=self._places[name], part=index, rank=len(down),
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
        check_adapter_slot(slot, self.slots)


def _keys_and_values(spec: KVSpec) -> tuple[Plane, Plane]:
    """The planes `k` and `v`; quantised ones have their scales behind both."""
    key, value = spec.planes[:2]
    if not {key.dtype, value.dtype} <= _STORAGES.keys():
        raise ValueError(f"the cpu backend stores KV in {', '.join(_STORAGES)}, not {key.dtype}")
    expected = [
        ("k", key.heads, key.dim, key.dtype),
        ("v", key.heads, value.dim, value.dtype),
        *(
            (f"{p.name}_scale", key.heads, 1, "f32")
            for p in (key, value)
            if p.dtype in KV_LARGEST_CODE
        ),
    ]
    if [(plane.name, plane.heads, plane.dim, plane.dtype) for plane in spec.planes] != expected:
        raise ValueError(
            "the cpu backend stores planes k and v of as many heads each, and the scales of those "
            "that are quantised (polysilicon.backend.kv_planes)"
        )
    return key, value
