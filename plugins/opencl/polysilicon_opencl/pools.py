"""KV pages: a buffer for each layer and plane, `[slots, heads, dim]`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyopencl as cl
from polysilicon.backend import KV_DTYPES, DeviceError, KVPool, KVSpec, Pending, Plane
from polysilicon.device_checks import check_block_headers, check_indexes, check_pages

from polysilicon_opencl.runtime import Runtime
from polysilicon_opencl.values import Block, Workspace

Bytes = npt.NDArray[np.uint8]


class OpenCLKVPool(KVPool):
    """See `KVPool`."""

    def __init__(self, runtime: Runtime, workspace: Workspace, spec: KVSpec, pages: int) -> None:
        self.spec = spec
        self.pages = pages
        self.slots = pages * spec.page_size
        self._runtime = runtime
        self._workspace = workspace
        self._closed = False
        self._buffers: dict[tuple[int, str], cl.Buffer] = {}
        self.nbytes = spec.page_bytes * pages
        self._planes = {plane.name: plane for plane in spec.planes}
        runtime.check_fits("KV pages", self.nbytes)
        for plane in spec.planes:
            runtime.check_buffer(f"KV plane {plane.name!r} of one layer", self._size(plane))
        for layer in spec.layers:
            for plane in spec.planes:
                buffer = runtime.allocate("KV pages", self._size(plane))
                self._buffers[layer, plane.name] = buffer
        runtime.allocated += self.nbytes

    def plane(self, name: str) -> Plane:
        return self._planes[name]

    def buffer(self, layer: int, name: str) -> cl.Buffer:
        self.check_open()
        return self._buffers[layer, name]

    def check_open(self) -> None:
        self._runtime.check_open()
        if self._closed:
            raise DeviceError(f"KV pool {self.spec.name!r} is closed")

    def copy(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        self.check_open()
        check_indexes("slots", source, self.slots)
        check_indexes("slots", target, self.slots)
        if not len(source):
            return
        runtime = self._runtime
        kernel = runtime.kernel("pages", "copy_slots")
        sources, targets = runtime.upload(source), runtime.upload(target)
        for (_, name), buffer in self._buffers.items():
            size = _row_bytes(self._planes[name]) * self._planes[name].heads
            runtime.launch(kernel, len(source), 1, buffer, sources, targets, size)

    def read(self, pages: Sequence[int], into: Bytes) -> Pending:
        self.check_open()
        index = check_pages(self.spec, pages, self.pages, into)
        header = np.frombuffer(self.spec.block_header(), np.uint8)
        staged = np.empty((*into.shape[:2], self.spec.block_bytes - header.size), np.uint8)
        block = self._workspace.take(staged.nbytes)
        self._move(index, block.buffer, reading=True)
        event = self._runtime.start_download(block.buffer, staged)
        return PendingRead(self._runtime, event, block, staged, header, into)

    def write(self, pages: Sequence[int], data: Bytes) -> Pending:
        self.check_open()
        index = check_pages(self.spec, pages, self.pages, data)
        check_block_headers(self.spec, data)
        content = np.ascontiguousarray(data[..., len(self.spec.block_header()) :])
        event = self._move(index, self._runtime.upload(content), reading=False)
        return PendingWrite(self._runtime, event)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._buffers = {}
            self._runtime.allocated -= self.nbytes
            self.nbytes = 0

    def _size(self, plane: Plane) -> int:
        return self.slots * plane.heads * _row_bytes(plane)

    def _move(
        self, pages: npt.NDArray[np.int64], blocks: cl.Buffer, *, reading: bool
    ) -> cl.Event | None:
        """Between planes and canonical blocks without headers; the event of the last kernel."""
        spec, runtime = self.spec, self._runtime
        kernel = runtime.kernel("pages", "move_pages")
        page_ids = runtime.upload(pages.astype(np.int32))
        count = len(pages) * (spec.page_size // spec.block)
        block_bytes = spec.token_bytes * spec.block
        part, event = 0, None
        for layer in spec.layers:
            for plane in spec.planes:
                size = _row_bytes(plane)
                event = runtime.launch(
                    kernel, plane.heads * spec.block, count, self._buffers[layer, plane.name],
                    blocks, page_ids, int(reading), spec.page_size, spec.block, plane.heads, size,
                    block_bytes, part,
                )  # fmt: skip
                part += plane.heads * spec.block * size
        return event


def _row_bytes(plane: Plane) -> int:
    return plane.dim * KV_DTYPES[plane.dtype].itemsize


class PendingWrite:
    """Pages that are being written."""

    def __init__(self, runtime: Runtime, event: cl.Event | None) -> None:
        self._runtime = runtime
        self._event = event

    def result(self) -> None:
        self._runtime.wait(self._event)


class PendingRead:
    """Pages that are being read: staged without headers, then put where the caller wants them."""

    def __init__(
        self,
        runtime: Runtime,
        event: cl.Event | None,
        block: Block,
        staged: Bytes,
        header: Bytes,
        into: Bytes,
    ) -> None:
        self._runtime = runtime
        self._event = event
        self._kept: tuple[Block, Bytes, Bytes, Bytes] | None = (block, staged, header, into)

    def result(self) -> None:
        if self._kept is None:
            return
        self._runtime.wait(self._event)
        _, staged, header, into = self._kept
        into[..., : header.size] = header
        into[..., header.size :] = staged
        self._kept = None
