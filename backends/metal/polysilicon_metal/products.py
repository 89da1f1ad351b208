"""Products of inputs with the segments of a placed matrix."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from polysilicon_metal import kernels
from polysilicon_metal.arrays import DTYPES, Array, to_device
from polysilicon_metal.hardware import has_gpu
from polysilicon_metal.quantization import Packed

Parameters = dict[str, Any]
"""What MLX's quantised functions take beside inputs and codes."""

FEW_ROWS = 8
"""Up to so many rows our own kernel reads the codes of groups of 16 once, where MLX's two products
read them twice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """What products are computed in. rounding: the dtype of inputs and results, and of dense
    weights, None where they stay float32. Sums are float32 in any case; on a CPU, whose 16-bit
    products are slow, the values are rounded and then multiplied as float32."""

    rounding: mx.Dtype | None
    on_gpu: bool

    @classmethod
    def of(cls, activations: str) -> Precision:
        rounding = None if activations in ("auto", "f32") else DTYPES[activations]
        return cls(rounding=rounding, on_gpu=has_gpu())

    def rounded(self, x: mx.array) -> mx.array:
        """x as a product takes it."""
        if self.rounding is None:
            return x.astype(mx.float32)
        x = x.astype(self.rounding)
        return x if self.on_gpu else x.astype(mx.float32)


class Segment(ABC):
    """Some outputs of a matrix `[N, K]`, or of a stack `[E, N, K]`. Results are float32."""

    inputs: int
    outputs: int
    nbytes: int

    @abstractmethod
    def product(self, x: mx.array) -> mx.array:
        """`[T, K]` to `[T, N]`."""

    @abstractmethod
    def expert_product(self, x: mx.array, experts: mx.array) -> mx.array:
        """`[T, 1 or k, K]` with experts int32 `[T, k]` to `[T, k, N]`."""

    @abstractmethod
    def rows(self, index: mx.array) -> mx.array:
        """Rows of a matrix: int32 `[n]` to `[n, K]`."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the memory."""


class DenseSegment(Segment):
    """Plain numbers: of the precision's dtype, or under `auto` on a GPU of their own."""

    def __init__(self, array: Array, precision: Precision, *, keep_dtype: bool) -> None:
        self.outputs, self.inputs = array.shape[-2:]
        self._precision = precision
        self._array = to_device(array)
        if not keep_dtype:
            self._array = precision.rounded(self._array)
        mx.eval(self._array)
        self.nbytes = int(self._array.nbytes)

    def product(self, x: mx.array) -> mx.array:
        y = self._inputs(x) @ self._array.T
        return self._result(y)

    def expert_product(self, x: mx.array, experts: mx.array) -> mx.array:
        x = self._inputs(x)[:, :, None, :]
        y = mx.gather_mm(x, self._array.swapaxes(-1, -2), rhs_indices=experts)
        return self._result(y).squeeze(-2)

    def rows(self, index: mx.array) -> mx.array:
        return self._array[index].astype(mx.float32)

    def release(self) -> None:
        self._array = mx.zeros((0, self.inputs))

    def _inputs(self, x: mx.array) -> mx.array:
        return self._precision.rounded(x).astype(self._array.dtype)

    def _result(self, y: mx.array) -> mx.array:
        return self._precision.rounded(y).astype(mx.float32)


class PackedSegment(Segment):
    """Codes, through MLX's quantised products."""

    def __init__(self, packed: Packed, precision: Precision) -> None:
        self.inputs = packed.inputs
        self.outputs = packed.codes.shape[-2]
        self._packed = dataclasses.replace(packed, codes=packed.codes[:0], scales=(), biases=())
        self._precision = precision
        self._codes = to_device(packed.codes)
        self._scales = [self._placed(scale) for scale in packed.scales]
        self._biases = [self._placed(bias) for bias in packed.biases]
        self._order = None if packed.order is None else to_device(packed.order)
        self._places = None
        if packed.order is not None:
            self._places = to_device(np.argsort(packed.order).astype(np.int32))
        mx.eval(self._codes, self._scales, self._biases)
        arrays = (self._codes, *self._scales, *self._biases)
        self.nbytes = sum(int(array.nbytes) for array in arrays)

    def product(self, x: mx.array) -> mx.array:
        x = self._inputs(x)
        if self._halved and self._precision.on_gpu and x.shape[0] <= FEW_ROWS:
            y = kernels.product_of_16(
                x, self._codes, self._scales, self._biases, bits=self._packed.bits
            )
        else:
            y = self._sum_of_halves(
                x, lambda x, parameters: mx.quantized_matmul(x, self._codes, **parameters)
            )
        return self._result(y)

    def expert_product(self, x: mx.array, experts: mx.array) -> mx.array:
        x = self._inputs(x)[:, :, None, :]
        y = self._sum_of_halves(
            x,
            lambda x, parameters: mx.gather_qmm(x, self._codes, rhs_indices=experts, **parameters),
        )
        return self._result(y).squeeze(-2)

    def rows(self, index: mx.array) -> mx.array:
        codes = self._codes[index]
        halves = [
            mx.dequantize(codes, **self._parameters(half, index), dtype=mx.float32)
            for half in range(len(self._scales))
        ]
        values = halves[0]
        if self._halved:
            values = mx.where(self._even_groups(), halves[0], halves[1])
        values = values[:, : self.inputs]
        if self._places is not None:
            values = values[:, self._places]
        return values if self._packed.factor is None else values * self._packed.factor

    def release(self) -> None:
        self._codes = self._codes[:0]
        self._scales, self._biases = [], []

    @property
    def _halved(self) -> bool:
        return len(self._scales) == 2

    def _placed(self, values: Array) -> mx.array:
        """Scales or biases in float32, whatever inputs are rounded to: bfloat16 would lose what
        scales of float16 hold. Codes of scales are bytes."""
        return to_device(np.ascontiguousarray(values))

    def _inputs(self, x: mx.array) -> mx.array:
        if self._order is not None:
            x = x[..., self._order]
        padding = self._packed.width - self.inputs
        if padding:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        return self._precision.rounded(x).astype(mx.float32)

    def _sum_of_halves(
        self, x: mx.array, product: Callable[[mx.array, Parameters], mx.array]
    ) -> mx.array:
        if not self._halved:
            return product(x, self._parameters(0))
        even = self._even_groups()
        zero = mx.zeros((), dtype=x.dtype)
        first = product(mx.where(even, x, zero), self._parameters(0))
        return first + product(mx.where(even, zero, x), self._parameters(1))

    def _even_groups(self) -> mx.array:
        """bool `[width]`: inputs of the even groups of 16."""
        return to_device(np.arange(self._packed.width) // 16 % 2 == 0)

    def _parameters(self, half: int, rows: mx.array | None = None) -> Parameters:
        scales = self._scales[half]
        biases = self._biases[half] if self._biases else None
        if rows is not None:
            scales = scales[rows]
            biases = None if biases is None else biases[rows]
        packed = self._packed
        return {
            "scales": scales,
            "biases": biases,
            "group_size": packed.group,
            "bits": packed.bits,
            "mode": packed.mode,
        }

    def _result(self, y: mx.array) -> mx.array:
        y = self._precision.rounded(y).astype(mx.float32)
        return y if self._packed.factor is None else y * self._packed.factor
