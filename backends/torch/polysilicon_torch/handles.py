"""Weights placed on a torch device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from polysilicon.backend import DeviceError, Handle, Shard, Weight
from polysilicon.device_checks import check_parts, shard_window
from polysilicon_torch.kernels import Kernels
from polysilicon_torch.packing import place_matrices, placed_bytes
from polysilicon_torch.placed import DenseMatrix, Matrix


class VectorHandle:
    """float32 `[N]` of concatenated parts: norm weights, biases, sinks."""

    def __init__(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> None:
        self.parts = parts
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise _closed()
        return self._tensor

    @property
    def nbytes(self) -> int:
        return 0 if self._tensor is None else self._tensor.nbytes

    def release(self) -> None:
        self._tensor = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """Parts of a weight that one product computes: the outputs of each, and their matrix."""

    parts: tuple[int, ...]
    matrix: Matrix


class MatrixHandle:
    """Parts of a matrix, or of a stack of experts' matrices, in as few products as their encodings
    allow. inputs: K. stacked: whether it is a stack."""

    def __init__(self, products: Sequence[Product], *, inputs: int, stacked: bool) -> None:
        self.parts = tuple(rows for product in products for rows in product.parts)
        self.inputs = inputs
        self.stacked = stacked
        self.nbytes = sum(product.matrix.nbytes for product in products)
        self._products: tuple[Product, ...] | None = tuple(products)

    @property
    def products(self) -> tuple[Product, ...]:
        if self._products is None:
            raise _closed()
        return self._products

    def float_values(self) -> torch.Tensor:
        """float32 `[N, K]` of a dense matrix of one part."""
        matrix = self.products[0].matrix
        if len(self.products) > 1 or not isinstance(matrix, DenseMatrix):
            raise ValueError("a matrix that is read element by element is dense, of one part")
        return matrix.values.float()

    def release(self) -> None:
        self._products = None
        self.nbytes = 0


def _closed() -> DeviceError:
    return DeviceError("the device that the weight was placed on is closed")


def matrix_of(handle: Handle, what: str) -> MatrixHandle:
    """A handle as a plain matrix. Raises ValueError."""
    if not isinstance(handle, MatrixHandle) or handle.stacked:
        raise ValueError(f"{what} is not a matrix placed on this device")
    return handle


def stack_of(handle: Handle, what: str) -> MatrixHandle:
    """A handle as a stack of matrices. Raises ValueError."""
    if not isinstance(handle, MatrixHandle) or not handle.stacked:
        raise ValueError(f"{what} is not a stack of matrices placed on this device")
    return handle


def vector_of(handle: Handle, what: str, size: int) -> torch.Tensor:
    """A handle's vector of this size. Raises ValueError."""
    if not isinstance(handle, VectorHandle):
        raise ValueError(f"{what} is not a vector placed on this device")
    if len(handle.tensor) != size:
        raise ValueError(f"{what} has {len(handle.tensor)} elements where {size} are needed")
    return handle.tensor


def place(
    parts: Sequence[Weight], shard: Shard | None, kernels: Kernels, device: torch.device
) -> VectorHandle | MatrixHandle:
    """See `Device.put`."""
    check_parts(parts, shard)
    if len(parts[0].shape) == 1:
        return _place_vector(parts, shard, device)
    rows = [
        end - begin
        for begin, end in (shard_window(part.shape[-2], "rows", shard) for part in parts)
    ]
    placed = place_matrices(
        parts, shard, dtype=kernels.dense_dtype, device=device, keep_codes=kernels.keeps_codes
    )
    products, first = [], 0
    for matrix, count in placed:
        products.append(Product(parts=tuple(rows[first : first + count]), matrix=matrix))
        first += count
    inputs = placed[0][0].shape[-1]
    return MatrixHandle(products, inputs=inputs, stacked=len(parts[0].shape) == 3)


def handle_bytes(parts: Sequence[Weight], shard: Shard | None, kernels: Kernels) -> int:
    """About what `place` takes."""
    check_parts(parts, shard)
    if len(parts[0].shape) == 1:
        return 4 * sum(part.shape[0] for part in parts)
    dtype, keep_codes = kernels.dense_dtype, kernels.keeps_codes
    return placed_bytes(parts, shard, dtype=dtype, keep_codes=keep_codes)


def _place_vector(
    parts: Sequence[Weight], shard: Shard | None, device: torch.device
) -> VectorHandle:
    cut = [part.dequantize()[slice(*shard_window(part.shape[0], "rows", shard))] for part in parts]
    tensor = torch.from_numpy(np.concatenate(cut, dtype=np.float32))
    return VectorHandle(tensor.to(device), tuple(len(part) for part in cut))
