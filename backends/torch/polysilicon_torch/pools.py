"""The KV pool of a torch device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from polysilicon.backend import DeviceError, KVPool, KVSpec, Plane
from polysilicon.device_checks import check_block_headers, check_indexes, check_pages
from polysilicon_torch.errors import contract_errors
from polysilicon_torch.planes import KVPlanes
from polysilicon_torch.staging import upload

if TYPE_CHECKING:
    from polysilicon_torch.device import TorchDevice

STORAGES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""The torch dtype of each KV dtype."""


class TorchKVPool(KVPool):
    """A tensor a plane, `[layers, pages, heads, page_size, dim]`: a canonical block is a slice of a
    page. Page 0 and what was never written hold zeros at first."""

    def __init__(self, device: TorchDevice, spec: KVSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        self._device = device
        self._layer_places = {layer: place for place, layer in enumerate(spec.layers)}
        self._tensors: dict[str, torch.Tensor] = {}
        by_name = {plane.name: plane for plane in spec.planes}
        if not {"k", "v"} <= set(by_name) <= {"k", "v", "k_scale", "v_scale"}:
            raise ValueError(f"KV planes are those of `kv_planes`, got {', '.join(by_name)}")
        with contract_errors("KV pages"):
            for name, plane in by_name.items():
                self._tensors[name] = torch.zeros(
                    (len(spec.layers), pages, plane.heads, spec.page_size, plane.dim),
                    dtype=STORAGES[plane.dtype],
                    device=device.runtime.device,
                )
        scales = {name: self._tensors.get(f"{name}_scale") for name in ("k", "v")}
        self._planes: KVPlanes | None = KVPlanes(
            k=self._tensors["k"],
            v=self._tensors["v"],
            k_scale=None if scales["k"] is None else scales["k"].squeeze(-1),
            v_scale=None if scales["v"] is None else scales["v"].squeeze(-1),
            dtype=by_name["k"].dtype,
            group=spec.group,
            window=spec.window,
            page_size=spec.page_size,
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def planes(self) -> KVPlanes:
        """Raises DeviceError when the pool is closed."""
        if self._planes is None:
            raise DeviceError(f"KV pool {self.spec.name!r} is closed")
        return self._planes

    def layer_place(self, layer: int) -> int:
        """Which of the pool's layers it is."""
        if layer not in self._layer_places:
            raise ValueError(f"KV pool {self.spec.name!r} does not hold layer {layer}")
        return self._layer_places[layer]

    def check_open(self) -> None:
        """Raise DeviceError when the pool or its device is closed."""
        self._device.check_open()
        assert self.planes

    def copy(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        self.check_open()
        if len(source) != len(target):
            raise ValueError(f"copy of {len(source)} slots to {len(target)}")
        for slots in (source, target):
            check_indexes("slots", slots, self.pages * self.spec.page_size)
        if not len(source):
            return
        size, runtime = self.spec.page_size, self._device.runtime
        with contract_errors("copying slots"), runtime.active():
            wide = {"source": source.astype(np.int64), "target": target.astype(np.int64)}
            index = upload(runtime, wide)
            for tensor in self._bytes():
                origin, goal = (
                    (index[name].div(size, rounding_mode="floor"), index[name].remainder(size))
                    for name in ("source", "target")
                )
                tensor[:, goal[0], :, goal[1]] = tensor[:, origin[0], :, origin[1]]

    def read(self, pages: Sequence[int], into: npt.NDArray[np.uint8]) -> PendingTransfer:
        self.check_open()
        index = check_pages(self.spec, pages, self.pages, into)
        runtime, header = self._device.runtime, self.spec.block_header()
        with contract_errors("reading KV pages"):
            with runtime.active():
                rows = upload(runtime, {"pages": index})["pages"]
                blocks = torch.empty(
                    self._block_shape(len(index)), dtype=torch.uint8, device=runtime.device
                )
                for part, tensor in self._parts(blocks):
                    part.copy_(tensor[:, rows].permute(1, 3, 0, 2, 4, 5))
                gathered = runtime.record()
            with runtime.aside():
                runtime.wait(gathered)
                host = runtime.host_tensor(tuple(blocks.shape), torch.uint8)
                host.copy_(blocks, non_blocking=True)
                runtime.share(blocks)
                ended = runtime.record()

        def finish() -> None:
            ended.synchronize()
            into[..., : len(header)] = np.frombuffer(header, np.uint8)
            body = into[..., len(header) :]
            body[...] = host.numpy().reshape(body.shape)

        return PendingTransfer(self._device, finish)

    def write(self, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> PendingTransfer:
        self.check_open()
        index = check_pages(self.spec, pages, self.pages, data)
        check_block_headers(self.spec, data)
        runtime, header = self._device.runtime, self.spec.block_header()
        with contract_errors("writing KV pages"):
            with runtime.aside():
                host = runtime.host_tensor(self._block_shape(len(index)), torch.uint8)
                body = data[..., len(header) :]
                host.numpy().reshape(body.shape)[...] = body
                blocks = torch.empty(host.shape, dtype=torch.uint8, device=runtime.device)
                blocks.copy_(host, non_blocking=True)
                arrived = runtime.record()
            with runtime.active():
                runtime.wait(arrived)
                rows = upload(runtime, {"pages": index})["pages"]
                for part, tensor in self._parts(blocks):
                    tensor[:, rows] = part.permute(2, 0, 3, 1, 4, 5)
                runtime.share(blocks)
                ended = runtime.record()
        return PendingTransfer(self._device, ended.synchronize)

    def close(self) -> None:
        self._planes = None
        self._tensors = {}

    def _block_shape(self, pages: int) -> tuple[int, int, int, int]:
        """Canonical blocks without their headers: `[pages, blocks, layers, bytes]`."""
        layers = len(self.spec.layers)
        layer_bytes = self.spec.token_bytes // layers * self.spec.block
        return pages, self.spec.page_size // self.spec.block, layers, layer_bytes

    def _bytes(self) -> list[torch.Tensor]:
        """The planes as bytes, `[layers, pages, heads, page_size, dim * itemsize]`."""
        return [self._tensors[plane.name].view(torch.uint8) for plane in self.spec.planes]

    def _parts(self, blocks: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each plane, its part of canonical blocks, `[pages, blocks, layers, heads, block,
        bytes]`, and its tensor, `[layers, pages, heads, blocks, block, bytes]`; both views."""
        parts, start, block = [], 0, self.spec.block
        for plane, tensor in zip(self.spec.planes, self._bytes(), strict=True):
            row = tensor.shape[-1]
            size = plane.heads * block * row
            part = blocks[..., start : start + size].unflatten(-1, _part_shape(plane, block, row))
            parts.append((part, tensor.unflatten(3, (-1, block))))
            start += size
        return parts


def _part_shape(plane: Plane, block: int, row: int) -> tuple[int, int, int]:
    return plane.heads, block, row


class PendingTransfer:
    """A transfer of pages that was submitted."""

    def __init__(self, device: TorchDevice, finish: Callable[[], None]) -> None:
        self._device = device
        self._finish: Callable[[], None] | None = finish

    def result(self) -> None:
        if self._finish is not None:
            with contract_errors("a transfer of KV pages"):
                self._finish()
            self._finish = None
