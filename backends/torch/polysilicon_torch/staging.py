"""Arrays of a call that go to the device in one transfer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from polysilicon_torch.runtime import Runtime

_ALIGNMENT = 16
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


@dataclasses.dataclass(frozen=True)
class Region:
    """An array's place in a buffer of bytes."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class Layout:
    """Places of named arrays in one buffer, each aligned to 16 bytes.

    arrays: by name, dtype (int32, int64, float32 or bool) and shape.
    """

    def __init__(self, arrays: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]) -> None:
        self.regions: dict[str, Region] = {}
        end = 0
        for name, (dtype, shape) in arrays.items():
            region = Region(-(-end // _ALIGNMENT) * _ALIGNMENT, np.dtype(dtype), shape)
            self.regions[name] = region
            end = region.end
        self.nbytes = max(end, 1)

    def host_views(self, buffer: torch.Tensor) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a host buffer, uint8 `[nbytes]`, to write into."""
        data: npt.NDArray[np.uint8] = buffer.numpy()
        return {
            name: data[region.offset : region.end].view(region.dtype).reshape(region.shape)
            for name, region in self.regions.items()
        }

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a device buffer, uint8 `[nbytes]`."""
        return {
            name: buffer[region.offset : region.end]
            .view(_TORCH_DTYPES[region.dtype])
            .view(region.shape)
            for name, region in self.regions.items()
        }


def upload(runtime: Runtime, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    """Copies of host arrays on the device, submitted to the current stream; they may be reused at
    once. Unsigned integers keep their bits as signed ones."""
    signed = {name: _signed(array) for name, array in arrays.items()}
    layout = Layout({name: (array.dtype, array.shape) for name, array in signed.items()})
    staged = runtime.host_tensor((layout.nbytes,), torch.uint8)
    for name, view in layout.host_views(staged).items():
        view[...] = signed[name]
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=runtime.device)
    buffer.copy_(staged, non_blocking=True)
    return layout.views(buffer)


def _signed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind != "u":
        return array
    return array.view(np.dtype(f"i{array.dtype.itemsize}"))
