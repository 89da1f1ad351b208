"""KV pages and adapter slots in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    KV_DTYPES,
    KV_LARGEST_CODE,
    AdapterPool,
    AdapterSpec,
    AdapterWeights,
    DeviceError,
    KVPool,
    KVScales,
    KVSpec,
)
from polysilicon.device_checks import (
    adapter_factors,
    check_adapter_slot,
    check_block_headers,
    check_indexes,
    check_pages,
)

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Completed(Generic[Result]):
    """A pending result that is there already."""

    value: Result

    def result(self) -> Result:
        return self.value


def turn(values: Float32) -> Float32:
    """The Walsh-Hadamard transform H of `KV_DTYPES` over the last axis; its own inverse."""
    dim = values.shape[-1]
    block = dim & -dim
    turned: Float32 = values.reshape(-1, block)
    size = 1
    while size < block:
        pairs = turned.reshape(-1, block // (2 * size), 2, size)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        turned = np.stack([first + second, first - second], axis=2).reshape(-1, block)
        size *= 2
    turned = turned * np.float32(block**-0.5)
    return turned.reshape(values.shape)


def quantize(
    values: Float32, dtype: str, calibrated: Float32 | None = None
) -> tuple[Array, Float32]:
    """Codes `[..., heads, dim]` and scales `[..., heads, 1]` of vectors, by the rule of
    `KV_DTYPES`; calibrated: the scales `[heads, 1]` of `fp8_e4m3` that take their place."""
    if dtype == "int8":
        values = turn(values)
    largest = np.float32(KV_LARGEST_CODE[dtype])
    scale = np.abs(values).max(axis=-1, keepdims=True) / largest
    scale[scale < np.finfo(np.float32).smallest_normal] = 0
    if calibrated is not None:
        scale = np.where(np.isfinite(scale), calibrated, scale)
    scale[~np.isfinite(scale)] = np.nan
    with np.errstate(over="ignore"):  # by a calibrated scale, of a value that saturates anyway
        quotients = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    if dtype == "int8":
        np.rint(quotients, out=quotients)
    else:
        np.clip(quotients, -largest, largest, out=quotients)
    return quotients.astype(KV_DTYPES[dtype]), scale


class ReferenceKVPool(KVPool):
    """Planes are arrays `[layers, pages * page_size, heads, dim]` in their own dtype."""

    def __init__(self, spec: KVSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        self.slots = pages * spec.page_size
        self._closed = False
        self._layer_index = {layer: index for index, layer in enumerate(spec.layers)}
        self._dtypes = {plane.name: plane.dtype for plane in spec.planes}
        self._planes = {
            plane.name: np.zeros(
                (len(spec.layers), self.slots, plane.heads, plane.dim), KV_DTYPES[plane.dtype]
            )
            for plane in spec.planes
        }

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._planes.values())

    def plane(self, name: str, layer: int) -> Array:
        """The plane of one layer, `[slots, heads, dim]`, to read from and write into."""
        self._check_open()
        layers = self._planes[name]
        array: Array = layers[self._layer_index[layer]]
        return array

    def store(
        self,
        layer: int,
        slots: npt.NDArray[np.int32],
        keys: Float32,
        values: Float32,
        scales: KVScales | None = None,
    ) -> None:
        """Write the K and V `[T, heads, dim]` of one layer at slots `[T]`, rounded to the dtype."""
        check_indexes("slots", slots, self.slots)
        for name, rows in (("k", keys), ("v", values)):
            plane, dtype = self.plane(name, layer), self._dtypes[name]
            if dtype in KV_LARGEST_CODE:
                calibrated = None
                if dtype == "fp8_e4m3" and scales is not None:
                    calibrated = np.array(getattr(scales, name), np.float32)[:, None]
                    if len(calibrated) != rows.shape[1]:
                        raise ValueError(
                            f"{len(calibrated)} scales of {name} for {rows.shape[1]} heads"
                        )
                codes, scale = quantize(rows, dtype, calibrated)
                plane[slots], self.plane(f"{name}_scale", layer)[slots] = codes, scale
            else:
                plane[slots] = rows

    def load(self, name: str, layer: int, slots: npt.NDArray[np.int64]) -> Float32:
        """Plane `k` or `v` of one layer at slots `[n]`: float32 `[n, heads, dim]`."""
        plane = self.plane(name, layer)
        values: Float32 = plane[slots].astype(np.float32, copy=False)
        if self._dtypes[name] in KV_LARGEST_CODE:
            values = values * self.plane(f"{name}_scale", layer)[slots]
        if self._dtypes[name] == "int8":
            values = turn(values)
        return values

    def copy(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        self._check_open()
        check_indexes("slots", source, self.slots)
        check_indexes("slots", target, self.slots)
        for array in self._planes.values():
            array[:, target] = array[:, source]

    def read(self, pages: Sequence[int], into: npt.NDArray[np.uint8]) -> Completed[None]:
        header = np.frombuffer(self.spec.block_header(), np.uint8)
        self._check_open()
        index = check_pages(self.spec, pages, self.pages, into)
        into[..., : header.size] = header
        position = header.size
        for layer, plane, size in self._block_parts():
            planes = self._paged(plane)[layer, index]
            # [page, block, slot, head, dim] to [page, block, head, slot, dim]
            data = np.ascontiguousarray(planes.swapaxes(2, 3)).view(np.uint8)
            into[..., position : position + size] = data.reshape(*into.shape[:2], size)
            position += size
        return Completed(None)

    def write(self, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> Completed[None]:
        self._check_open()
        index = check_pages(self.spec, pages, self.pages, data)
        check_block_headers(self.spec, data)
        position = len(self.spec.block_header())
        for layer, plane, size in self._block_parts():
            target = self._paged(plane)
            _, _, count, block, heads, dim = target.shape
            part = np.ascontiguousarray(data[..., position : position + size])
            values = part.view(target.dtype).reshape(len(index), count, heads, block, dim)
            target[layer, index] = values.swapaxes(2, 3)
            position += size
        return Completed(None)

    def close(self) -> None:
        self._closed = True
        self._planes = {}

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"KV pool {self.spec.name!r} is closed")

    def _paged(self, plane: str) -> Array:
        """A view `[layers, pages, blocks, block, heads, dim]`."""
        array, spec = self._planes[plane], self.spec
        layers, _, heads, dim = array.shape
        return array.reshape(
            layers, self.pages, spec.page_size // spec.block, spec.block, heads, dim
        )

    def _block_parts(self) -> list[tuple[int, str, int]]:
        """(layer, plane, bytes) of a canonical block's parts, in their order."""
        return [
            (layer, plane.name, plane.heads * self.spec.block * plane.dim * itemsize)
            for layer in range(len(self.spec.layers))
            for plane in self.spec.planes
            for itemsize in [KV_DTYPES[plane.dtype].itemsize]
        ]


class ReferenceAdapterPool(AdapterPool):
    """Adapters as they were given, by slot, target and part."""

    def __init__(self, spec: AdapterSpec, slots: int) -> None:
        self.spec = spec
        self.slots = slots
        self._closed = False
        self._adapters: dict[int, dict[str, list[tuple[Float32, Float32] | None]]] = {}

    @property
    def nbytes(self) -> int:
        return sum(
            part[0].nbytes + part[1].nbytes
            for adapter in self._adapters.values()
            for parts in adapter.values()
            for part in parts
            if part is not None
        )

    def parts(self, slot: int, target: str) -> Sequence[tuple[Float32, Float32] | None]:
        """(A, B) for each part of a target, empty where the slot's adapter leaves it unchanged."""
        self._check_open()
        if target not in self.spec.targets:
            raise ValueError(f"the adapter pool has no target {target!r}")
        return self._adapters.get(slot, {}).get(target, ())

    def write(self, slot: int, weights: AdapterWeights) -> None:
        self._check_slot(slot)
        adapter: dict[str, list[tuple[Float32, Float32] | None]] = {}
        for name, index, down, up in adapter_factors(self.spec, weights):
            parts = adapter.setdefault(name, [None] * len(self.spec.targets[name].outputs))
            parts[index] = (down, up)
        self._adapters[slot] = adapter

    def clear(self, slot: int) -> None:
        self._check_slot(slot)
        self._adapters.pop(slot, None)

    def close(self) -> None:
        self._closed = True
        self._adapters = {}

    def _check_slot(self, slot: int) -> None:
        self._check_open()
        check_adapter_slot(slot, self.slots)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("the adapter pool is closed")
