"""Where a device computes: a card with its streams, or the host, which needs none.

A card is `torch.cuda` to torch, whoever made it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from polysilicon.host_memory import check_fits, free_memory, total_memory


class Event(Protocol):
    """A point in the order of the submitted work."""

    def synchronize(self) -> None:
        """Wait until everything before it has ended."""


class Graphs(Protocol):
    """Captures work once, to submit it again at the cost of one call."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Call `run` without executing what it submits; gives what replays it, and what `run`
        returned, whose tensors every replay fills anew."""

    @property
    def nbytes(self) -> int:
        """Device memory that captured work keeps for itself."""


class Runtime(ABC):
    """device: where tensors live. graphs: None where nothing can be captured."""

    device: torch.device
    graphs: Graphs | None

    @abstractmethod
    def active(self) -> contextlib.AbstractContextManager[None]:
        """Inside, work is submitted to the device's stream of computing."""

    @abstractmethod
    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Inside, to the stream of transfers, which runs beside it."""

    @abstractmethod
    def record(self) -> Event:
        """The point reached on the current stream."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """What is submitted to the current stream from now on runs after `event`."""

    @abstractmethod
    def share(self, tensor: torch.Tensor) -> None:
        """The current stream uses a tensor that was allocated on the other one: its memory is not
        given to others before that ended."""

    @abstractmethod
    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that transfers of either direction run from at full speed; free once nothing
        refers to it and its transfers ended."""

    @abstractmethod
    def check_fits(self, what: str, size: int) -> None:
        """Raise OutOfMemory where an allocation that the system would grant does not fit."""

    @abstractmethod
    def memory(self) -> tuple[int, int, int]:
        """Bytes: in total, free, and held by torch's allocator for tensors of this device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was submitted."""


class _Now:
    """The event of a device on which everything has ended when its call returns."""

    def synchronize(self) -> None:
        return


class HostRuntime(Runtime):
    """torch on the host: every call computes before it returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.graphs: Graphs | None = None

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record(self) -> Event:
        return _Now()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def share(self, tensor: torch.Tensor) -> None:
        return

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def check_fits(self, what: str, size: int) -> None:
        check_fits(what, size)

    def memory(self) -> tuple[int, int, int]:
        return total_memory(), free_memory(), 0

    def synchronize(self) -> None:
        return


class CardRuntime(Runtime):
    """A card, by its index in torch."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        # Products accumulate in float32, as the contract says, split or not.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._compute = torch.cuda.Stream(self.device)
        self._transfer = torch.cuda.Stream(self.device)
        self.graphs: Graphs | None = CardGraphs(self.device, self._compute)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._transfer):
            yield

    def record(self) -> Event:
        event: Event = torch.cuda.Event()
        torch.cuda.current_stream(self.device).record_event(event)
        return event

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def share(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def check_fits(self, what: str, size: int) -> None:
        return

    def memory(self) -> tuple[int, int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device)
        unused = held - torch.cuda.memory_allocated(self.device)
        return total, min(total, free + unused), held

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class CardGraphs:
    """CUDA and HIP graphs of one device. They share their scratch memory, for they never run at the
    same time."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self.nbytes = 0

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # as entering the capture does, which would hide what it takes
        before = torch.cuda.memory_reserved(self._device)
        # Another thread may go on calling the driver (another device, a transfer's host memory).
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = run()
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        replay: Callable[[], None] = graph.replay
        return replay, outputs
