"""KV pages: an array for every layer and plane, written in place."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    KV_DTYPES,
    KV_LARGEST_CODE,
    DeviceError,
    KVPool,
    KVSpec,
    Plane,
    kv_planes,
)
from polysilicon.device_checks import check_block_headers, check_indexes, check_pages
from polysilicon_metal.arrays import DTYPES, Array, to_device, to_host
from polysilicon_metal.queue import Stage

if TYPE_CHECKING:
    from polysilicon_metal.device import MetalDevice

Key = tuple[int, str]
"""A layer's place in the pool, and the name of a plane."""


class PendingWork:
    """Work without a value."""

    def __init__(self, device: MetalDevice, stage: Stage | None) -> None:
        self._device = device
        self._stage = stage

    def result(self) -> None:
        if self._stage is not None:
            self._device.wait(self._stage)


class MetalKVPool(KVPool):
    """Arrays `[slots, heads, dim]`. They are separate so that a layer's attention, which holds what
    it reads, never makes another layer's write copy it."""

    def __init__(self, device: MetalDevice, spec: KVSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        self.slots = pages * spec.page_size
        self.key, self.value = _keys_and_values(spec)
        self._device = device
        self._places = {layer: place for place, layer in enumerate(spec.layers)}
        self.keys: tuple[Key, ...] = tuple(
            itertools.product(range(len(spec.layers)), [plane.name for plane in spec.planes])
        )
        self.arrays = {
            (place, plane.name): mx.zeros(
                (self.slots, plane.heads, plane.dim), dtype=DTYPES[plane.dtype]
            )
            for place in range(len(spec.layers))
            for plane in spec.planes
        }
        mx.eval(self.arrays)
        # Whether something was assigned that no stage evaluates yet.
        self.dirty = False
        self.nbytes = sum(int(array.nbytes) for array in self.arrays.values())

    @property
    def quantised(self) -> bool:
        return self.key.dtype in KV_LARGEST_CODE

    @property
    def turned(self) -> bool:
        """Whether vectors are stored as their Walsh-Hadamard transform."""
        return self.key.dtype == "int8"

    def place_of(self, layer: int) -> int:
        """Which of the pool's layers it is."""
        if layer not in self._places:
            raise ValueError(f"KV pool {self.spec.name!r} does not hold layer {layer}")
        return self._places[layer]

    def check_open(self) -> None:
        """Raise DeviceError when the pool or its device is closed."""
        self._device.check_open()
        if not self.arrays:
            raise DeviceError(f"KV pool {self.spec.name!r} is closed")

    def copy(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        self.check_open()
        if len(source) != len(target):
            raise ValueError(f"copy of {len(source)} slots to {len(target)}")
        for slots in (source, target):
            check_indexes("slots", slots, self.slots)
        if not len(source):
            return
        with self._device.active():
            taken = [self.arrays[key][mx.array(source)] for key in self.keys]
            self._submit_read(taken)
            self._assign(mx.array(target), taken)

    def read(self, pages: Sequence[int], into: npt.NDArray[np.uint8]) -> PendingWork:
        self.check_open()
        index = check_pages(self.spec, pages, self.pages, into)
        header = np.frombuffer(self.spec.block_header(), np.uint8)
        if not len(index):
            return PendingWork(self._device, None)
        with self._device.active():
            slots = self._slots_of(index)
            taken = [self.arrays[key][slots] for key in self.keys]

            def fill() -> None:
                into[..., : header.size] = header
                position = header.size
                for array in taken:
                    data = self._to_blocks(to_host(array))
                    into[..., position : position + data.shape[-1]] = data
                    position += data.shape[-1]

            return PendingWork(self._device, self._submit_read(taken, fill))

    def write(self, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> PendingWork:
        self.check_open()
        index = check_pages(self.spec, pages, self.pages, data)
        check_block_headers(self.spec, data)
        if not len(index):
            return PendingWork(self._device, None)
        with self._device.active():
            position = len(self.spec.block_header())
            rows = []
            for plane in self.spec.planes * len(self.spec.layers):
                itemsize = KV_DTYPES[plane.dtype].itemsize
                size = plane.heads * self.spec.block * plane.dim * itemsize
                part = np.ascontiguousarray(data[..., position : position + size])
                rows.append(to_device(self._from_blocks(part, plane)))
                position += size
            self._assign(self._slots_of(index), rows)
            stage = Stage(arrays=list(self.arrays.values()), writes=True)
            self.dirty = False
            return PendingWork(self._device, self._device.queue.add(stage))

    def close(self) -> None:
        if self.arrays:
            with self._device.active():
                self._device.queue.drain()
            self.forget()

    def forget(self) -> None:
        """Free it; the device has ended what used it."""
        self.arrays = {}
        self.nbytes = 0

    def _assign(self, slots: mx.array, rows: Sequence[mx.array]) -> None:
        for key, values in zip(self.keys, rows, strict=True):
            # Assigning changes the object, which a stage may hold for what it was.
            self.arrays[key] = copy.copy(self.arrays[key])
            self.arrays[key][slots] = values
        self.dirty = True

    def _submit_read(
        self, arrays: Sequence[mx.array], finish: Callable[[], None] | None = None
    ) -> Stage:
        stage = Stage(arrays=arrays, writes=self.dirty, finish=finish)
        self.dirty = False
        return self._device.queue.add(stage)

    def _slots_of(self, pages: npt.NDArray[np.int64]) -> mx.array:
        size = self.spec.page_size
        slots = pages[:, None] * size + np.arange(size)
        return mx.array(slots.ravel().astype(np.int32))

    def _to_blocks(self, rows: Array) -> npt.NDArray[np.uint8]:
        """`[pages * page_size, heads, dim]` as bytes `[pages, blocks, head * slot * dim]`."""
        spec = self.spec
        _, heads, dim = rows.shape
        paged = rows.reshape(-1, spec.page_size // spec.block, spec.block, heads, dim)
        data = np.ascontiguousarray(paged.swapaxes(2, 3)).view(np.uint8)
        return data.reshape(*paged.shape[:2], -1)

    def _from_blocks(self, data: npt.NDArray[np.uint8], plane: Plane) -> Array:
        """Undo `_to_blocks`."""
        values = data.view(KV_DTYPES[plane.dtype])
        blocks = values.reshape(*data.shape[:2], plane.heads, self.spec.block, plane.dim)
        return np.ascontiguousarray(blocks.swapaxes(2, 3)).reshape(-1, plane.heads, plane.dim)


def _keys_and_values(spec: KVSpec) -> tuple[Plane, Plane]:
    """The planes `k` and `v` of what `kv_planes` makes."""
    key, value = spec.planes[:2]
    expected = kv_planes(heads=key.heads, key_dim=key.dim, value_dim=value.dim, dtype=key.dtype)
    if tuple(spec.planes) != expected:
        raise ValueError(
            "the metal backend stores planes k and v of as many heads and one dtype, and the "
            "scales of quantised ones, as polysilicon.backend.kv_planes makes them"
        )
    return key, value
