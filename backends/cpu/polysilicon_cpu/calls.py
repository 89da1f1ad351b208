"""Calls that were submitted to a device's queue."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import TYPE_CHECKING

from polysilicon.backend import DeviceError
from polysilicon_cpu import library
from polysilicon_cpu.arrays import Float32, aligned

if TYPE_CHECKING:
    from polysilicon_cpu.device import CPUDevice


class Call:
    """One call. kept: what its native part reads and writes, at least until it has ended."""

    def __init__(self, device: CPUDevice, ticket: int, *kept: object) -> None:
        self.device = device
        self.ticket = ticket
        self.kept: tuple[object, ...] = kept
        self._error: library.ErrorText | None = None
        self._ended = False

    def wait(self) -> None:
        """Wait for it, with the GIL released. Raises what it failed with, every time."""
        if not self._ended:
            error = library.ErrorText()
            if not library.load().ps_wait(
                self.device.open_pointer(), self.ticket, ctypes.byref(error)
            ):
                self._error = error
            self._ended = True
            self.kept = ()
        if self._error is not None:
            library.raise_error(self._error)


class PendingWork(Call):
    """Work without a value."""

    def result(self) -> None:
        self.wait()


class InFlight:
    """Holds on to submitted calls until they have ended, whether or not anyone reads them."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()

    def add(self, call: Call) -> None:
        self._calls.append(call)
        native, pointer = library.load(), call.device.open_pointer()
        while self._calls and native.ps_done(pointer, self._calls[0].ticket):
            # What it keeps would otherwise hold on to the step before it, and that to its own.
            self._calls.popleft().kept = ()

    def wait(self) -> None:
        """Wait for all of them, whatever became of them."""
        if self._calls:
            last = self._calls[-1]
            error = library.ErrorText()
            library.load().ps_wait(last.device.open_pointer(), last.ticket, ctypes.byref(error))

    def clear(self) -> None:
        """Let go of all of them: the device is closed."""
        for call in self._calls:
            call.kept = ()
        self._calls.clear()


class ArrayPool:
    """Output arrays, used again once nobody has them: fresh pages would cost more than the copy
    that fills them. Of those that nobody has, the few largest are kept, and serve for less too."""

    def __init__(self) -> None:
        # By id. Finalizers change it in the middle of anything: what it holds is copied first.
        self._free: dict[int, Float32] = {}
        self.nbytes = 0

    def take(self, count: int, owner: object) -> Float32:
        """float32 `[count]`, given back when `owner` is collected."""
        fitting = [array for array in list(self._free.values()) if len(array) >= count]
        if fitting:
            array = min(fitting, key=len)
            del self._free[id(array)]
        else:
            # Rounded up to an eighth of a power of two, so that it serves for a little more too.
            unit = 1 << max(0, count.bit_length() - 4)
            array = aligned(-(-max(count, 1) // unit) * unit)
            self.nbytes += array.nbytes
        weakref.finalize(owner, self._give_back, array).atexit = False
        return array[:count]

    def _give_back(self, array: Float32) -> None:
        self._free[id(array)] = array
        if len(self._free) > _KEPT:
            smallest = min(list(self._free.values()), key=len)
            del self._free[id(smallest)]
            self.nbytes -= smallest.nbytes


_KEPT = 4


def closed_error(what: str) -> DeviceError:
    return DeviceError(f"{what} is closed")
