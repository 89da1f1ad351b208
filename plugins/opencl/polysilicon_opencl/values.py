"""Values of a forward: matrices in buffers that are used again once nothing refers to them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pyopencl as cl
from polysilicon.backend import OutOfMemory

if TYPE_CHECKING:
    from polysilicon_opencl.runtime import Runtime


class Block:
    """A piece of the workspace; it goes back when the last value in it is dropped. As all calls run
    in order, what is enqueued next may overwrite it even though the device has not got there."""

    __slots__ = ("_workspace", "buffer", "nbytes")

    def __init__(self, workspace: Workspace, buffer: cl.Buffer, nbytes: int) -> None:
        self._workspace = workspace
        self.buffer = buffer
        self.nbytes = nbytes

    def __del__(self) -> None:
        self._workspace.give_back(self.buffer, self.nbytes)


class Workspace:
    """Buffers of a few sizes, kept for the next step."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._idle: dict[int, list[cl.Buffer]] = {}
        self.nbytes = 0

    def take(self, nbytes: int) -> Block:
        """A block of at least so many bytes. Raises OutOfMemory."""
        size = rounded_size(nbytes)
        idle = self._idle.get(size)
        if idle:
            return Block(self, idle.pop(), size)
        self._runtime.check_buffer("workspace", size)
        try:
            buffer = self._runtime.allocate("workspace", size)
        except OutOfMemory:
            self.trim()
            buffer = self._runtime.allocate("workspace", size)
        self.nbytes += size
        self._runtime.allocated += size
        return Block(self, buffer, size)

    def give_back(self, buffer: cl.Buffer, nbytes: int) -> None:
        self._idle.setdefault(nbytes, []).append(buffer)

    def trim(self) -> None:
        """Free what is idle."""
        for size, buffers in self._idle.items():
            self.nbytes -= size * len(buffers)
            self._runtime.allocated -= size * len(buffers)
        self._idle.clear()

    def floats(self, rows: int, columns: int) -> Value:
        """A new float32 matrix, its contents undefined."""
        return Value(self.take(4 * rows * columns), 0, columns, rows, columns)


def rounded_size(nbytes: int) -> int:
    """The next of the sizes 1, 1.25, 1.5 and 1.75 times a power of 2, at least 256."""
    if nbytes <= 256:
        return 256
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Value:
    """float32 `[rows, columns]`; element (i, j) stands at `at + i * stride + j` of the buffer."""

    block: Block
    at: int
    stride: int
    rows: int
    columns: int

    @property
    def buffer(self) -> cl.Buffer:
        return self.block.buffer

    @property
    def contiguous(self) -> bool:
        return self.at == 0 and self.stride == self.columns

    def part(self, begin: int, columns: int) -> Value:
        """Some of the columns, in place."""
        return Value(self.block, self.at + begin, self.stride, self.rows, columns)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """int32 `[count]`, from element `at` of a buffer on. block: what they keep, if anything."""

    buffer: cl.Buffer
    at: int
    count: int
    block: Block | None = None
