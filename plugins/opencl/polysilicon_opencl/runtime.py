"""Context, queue, compiled kernels and memory of one OpenCL device."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
from polysilicon.backend import DeviceError, DeviceLost, OutOfMemory
from polysilicon.host_memory import check_fits, free_memory, total_memory

from polysilicon_opencl.tuning import Tuning

_PRELUDES = {
    "product_few": ("common", "matrix", "weights"),
    "product_panel": ("common", "matrix", "weights"),
    "product_tiled": ("common", "matrix", "weights"),
    "embed": ("common", "matrix", "weights"),
    "rows": ("common", "matrix"),
    "attention": ("common", "kv"),
    "attention_heads": ("common", "kv"),
}
"""What stands before a file of kernels; `common` alone where it is not listed."""

_SCALARS: dict[str, type[np.generic]] = {
    "uint": np.uint32,
    "int": np.int32,
    "float": np.float32,
    "ulong": np.uint64,
}

_NO_MEMORY = {
    cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
    cl.status_code.OUT_OF_RESOURCES,
    cl.status_code.OUT_OF_HOST_MEMORY,
    cl.status_code.INVALID_BUFFER_SIZE,
}


class Kernel:
    """A compiled kernel. lanes: the size of its work-groups where it has lanes."""

    def __init__(self, kernel: cl.Kernel, lanes: int) -> None:
        self.kernel = kernel
        self.lanes = lanes


class Runtime:
    """One device's context and in-order queue."""

    def __init__(self, device: cl.Device, tuning: Tuning) -> None:
        self.device = device
        self.tuning = tuning
        self.shares_host_memory = bool(
            device.type & cl.device_type.CPU or device.host_unified_memory
        )
        with translated_errors("opening the device"):
            self.context = cl.Context([device])
            self.queue = cl.CommandQueue(self.context, device)
        self.allocated = 0
        self.closed = False
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self.nothing = self.upload(np.zeros(16, np.uint32))

    def check_open(self) -> None:
        if self.closed:
            raise DeviceError("the device is closed")

    # Memory.

    @property
    def total(self) -> int:
        size = int(self.device.global_mem_size)
        return min(size, total_memory()) if self.shares_host_memory else size

    @property
    def free(self) -> int:
        """As far as it can be told: OpenCL does not say what other programs use of a device."""
        left = max(0, self.total - self.allocated)
        return min(left, free_memory()) if self.shares_host_memory else left

    def allocate(self, what: str, nbytes: int) -> cl.Buffer:
        """A buffer, whose bytes the caller counts in `allocated`. Raises OutOfMemory."""
        self.check_open()
        self.check_fits(what, nbytes)
        with translated_errors(f"allocating {nbytes:,} bytes of {what}"):
            return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, max(nbytes, 4))

    def forget(self, nbytes: int) -> None:
        """Bytes that are free again."""
        self.allocated -= nbytes

    def check_fits(self, what: str, nbytes: int) -> None:
        """Raises OutOfMemory where so many bytes cannot be had, all together."""
        left = self.total - self.allocated
        if nbytes > left:
            raise OutOfMemory(
                f"{nbytes:,} bytes of {what} do not fit in the {left:,} that are free"
            )
        if self.shares_host_memory:
            check_fits(what, nbytes)

    def check_buffer(self, what: str, nbytes: int) -> None:
        """Raises OutOfMemory where one buffer cannot be so large."""
        limit = int(self.device.max_mem_alloc_size)
        if nbytes > limit:
            raise OutOfMemory(
                f"{nbytes:,} bytes of {what} do not fit in one OpenCL buffer: this device's hold "
                f"{limit:,}"
            )

    def upload(self, array: npt.NDArray[Any]) -> cl.Buffer:
        """A new buffer with a copy of the array, which may be changed at once."""
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        if not array.nbytes:
            array = np.zeros(4, np.uint8)
        with translated_errors(f"uploading {array.nbytes:,} bytes"):
            return cl.Buffer(self.context, flags, hostbuf=np.ascontiguousarray(array))

    # Kernels.

    def kernel(self, file: str, name: str, **macros: int) -> Kernel:
        """A kernel of `kernels/FILE.cl`, compiled once for each set of macros."""
        key = (name, *macros.items())
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = self._build(file, name, macros)
        return found

    def _build(self, file: str, name: str, macros: dict[str, int]) -> Kernel:
        source = source_of(file)
        lanes = macros.pop("LANES", self.tuning.lanes)
        options = [f"-D{key}={value}" for key, value in macros.items()]
        options += [f"-DSEGMENT={self.tuning.segment}"]
        while True:
            with translated_errors(f"compiling {file}.cl"):
                # pyopencl and most drivers keep what was built for the next start.
                program = cl.Program(self.context, source).build([*options, f"-DLANES={lanes}"])
                kernel = cl.Kernel(program, name)
                most = kernel.get_work_group_info(
                    cl.kernel_work_group_info.WORK_GROUP_SIZE, self.device
                )
            if lanes <= most or lanes == 1:
                break
            lanes //= 2
        kernel.set_scalar_arg_dtypes(argument_types(source, name))
        return Kernel(kernel, lanes)

    def launch(self, kernel: Kernel, rows: int, layers: int, *arguments: Any) -> cl.Event | None:
        """Enqueue `rows` by `layers` work-groups of the kernel's lanes (nothing where there are
        none); the work-group's numbers are group ids 1 and 2."""
        return self.launch_groups(
            kernel, (kernel.lanes, rows, layers), (kernel.lanes, 1, 1), *arguments
        )

    def launch_groups(
        self, kernel: Kernel, items: tuple[int, ...], group: tuple[int, ...], *arguments: Any
    ) -> cl.Event | None:
        self.check_open()
        if 0 in items:
            return None
        try:
            kernel.kernel.set_args(*arguments)
            return cl.enqueue_nd_range_kernel(self.queue, kernel.kernel, items, group)
        except cl.Error as error:
            raise translated(error, "enqueueing a kernel") from error

    # Copies.

    def copy(self, source: cl.Buffer, target: cl.Buffer, nbytes: int, target_at: int = 0) -> None:
        """Copy on the device, in order."""
        if nbytes:
            with translated_errors("copying on the device"):
                cl.enqueue_copy(self.queue, target, source, byte_count=nbytes, dst_offset=target_at)

    def fill_zeros(self, target: cl.Buffer, at: int, nbytes: int) -> None:
        if nbytes:
            with translated_errors("clearing memory"):
                cl.enqueue_fill_buffer(self.queue, target, np.zeros(1, np.uint8), at, nbytes)

    def start_download(self, source: cl.Buffer, target: npt.NDArray[Any]) -> cl.Event | None:
        """Copy to a host array, in order; the array is filled once the event is complete."""
        self.check_open()
        if not target.nbytes:
            return None
        with translated_errors("reading from the device"):
            event = cl.enqueue_copy(self.queue, target, source, is_blocking=False)
            self.queue.flush()
        return event

    def wait(self, event: cl.Event | None) -> None:
        self.check_open()
        if event is not None:
            with translated_errors("waiting for the device"):
                event.wait()

    def flush(self) -> None:
        """Have the device begin with what was enqueued."""
        with translated_errors("submitting to the device"):
            self.queue.flush()

    def finish(self) -> None:
        if not self.closed:
            with translated_errors("waiting for the device"):
                self.queue.finish()

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(DeviceError):
                self.finish()
            self.closed = True
            self._kernels.clear()


def translated(error: cl.Error, doing: str) -> DeviceError:
    """What the contract calls an OpenCL error."""
    if isinstance(error, cl.MemoryError) or getattr(error, "code", None) in _NO_MEMORY:
        return OutOfMemory(f"{doing}: {error}")
    return DeviceLost(f"{doing}: {error}")


@contextlib.contextmanager
def translated_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except cl.Error as error:
        raise translated(error, doing) from error


@functools.cache
def source_of(file: str) -> str:
    folder = importlib.resources.files("polysilicon_opencl") / "kernels"
    names = (*_PRELUDES.get(file, ("common",)), file)
    return "\n".join((folder / f"{name}.cl").read_text("utf-8") for name in names)


def argument_types(source: str, name: str) -> list[type[np.generic] | None]:
    """Of a kernel's arguments: the type of each scalar, None for each buffer."""
    declared = re.search(rf"void {name}\(([^)]*)\)", source)
    assert declared is not None, name
    types: list[type[np.generic] | None] = []
    for argument in declared[1].split(","):
        words = argument.split()
        pointer = "*" in argument or words[0] == "Matrix"
        types.append(None if pointer else _SCALARS[words[0]])
    return types
