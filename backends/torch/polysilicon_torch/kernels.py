"""The kernels that a torch device computes with: what stands between its ops and Triton or torch.

Rules for every kernel
- Tensors are on the device's own stream; nothing waits for it, reads a tensor on the host, or
  allocates but through `torch.empty` and its like: all of it can be captured in a graph.
- A two-dimensional activation has stride 1 along its last axis and any stride between rows, for the
  parts of a fused product are views of its columns. Results that are new tensors are contiguous.
- Sizes known to the host (shapes and the fields of `DeviceBatch` that are ints) are buckets; what a
  step really has stands in `query_start` and `context_len`. Rows past `query_start[-1]` are
  padding: they may hold anything, and so may page 0 of a pool.
- A is the device's activation dtype (`Kernels.dtype`). Accumulation, softmax and statistics are
  float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from polysilicon.backend import Routing

if TYPE_CHECKING:
    from polysilicon_torch.adapters import LoraTarget
    from polysilicon_torch.batches import DeviceBatch
    from polysilicon_torch.placed import Matrix
    from polysilicon_torch.planes import KVPlanes
    from polysilicon_torch.sampling import DeviceSamplingBatch, SampledTensors
    from polysilicon_torch.tuning import Tuning

__all__ = ["AttentionSettings", "DeviceRope", "HeadNorm", "Kernels"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeviceRope:
    """`polysilicon.ops.Rope` with its frequencies on the device.

    frequencies: float32 `[dim / 2]`, radians a position. turns: the same for integer arithmetic,
    int64 `[dim / 2]`, in 2^-64 of a full turn: `polysilicon_torch.angles.turns_of(frequencies)`.
    """

    dim: int
    frequencies: torch.Tensor
    turns: torch.Tensor
    scale: float
    interleaved: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeadNorm:
    """An RMS norm over each head. weight: float32 `[Dh]`."""

    weight: torch.Tensor
    eps: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AttentionSettings:
    """What `Ops.attention` is told beside its values; sinks: float32 `[H]` or None; key_scales and
    value_scales: its `kv_scales` where the planes are fp8_e4m3, float32 `[Hk]` each, else None."""

    heads: int
    scale: float
    rope: DeviceRope | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class Kernels(Protocol):
    """One way to compute the operations of a torch device.

    dtype: A. dense_dtype: what dense matrices are kept in, A or float32. keeps_codes: whether
    quantised weights are multiplied as they are; where not, they are placed dequantised, as dense
    matrices.
    """

    dtype: torch.dtype
    dense_dtype: torch.dtype
    keeps_codes: bool

    @property
    def tuning(self) -> Tuning | None:
        """The tables that choose block sizes, None where there are none to choose."""

    def gather_tokens(
        self, tokens: torch.Tensor, source: torch.Tensor, previous: torch.Tensor
    ) -> None:
        """In place: `tokens[t] = previous[source[t]]` where `source[t] >= 0`. int32 `[T]`, `[T]`
        and `[L]`, the rows sampled in the step before."""

    def embed(self, table: Matrix, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of a matrix `[V, D]` by token int32 `[T]`: float32 `[T, D]`."""

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """`x W^T + bias`: `[T, K]` of A or float32, rounded to A before the product, and bias
        float32 `[N]`, to float32 `[T, N]`."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`h = x + residual` (or x), and `h / sqrt(mean(h^2) + eps) * weight`: x `[T, D]` of A or
        float32, residual float32; the norm in A, then h in float32, which may be x itself where
        that is float32 and there is no residual."""

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(h - mean) / sqrt(var + eps) * weight + bias`, and h, as `rms_norm`."""

    def gated_act(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        """`act(gate) * up` as `Ops.gated_act` defines it: `[T, F]` of A or float32 to A."""

    def rope(
        self, x: torch.Tensor, positions: torch.Tensor, rope: DeviceRope, heads: int
    ) -> torch.Tensor:
        """Rotate each head of `[T, heads * Dh]`, A or float32, by int32 `[T]`: the same dtype."""

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: DeviceBatch,
        planes: KVPlanes,
        layer: int,
        settings: AttentionSettings,
    ) -> torch.Tensor:
        """`Ops.attention`: q `[T, H * Dh]`, k `[T, Hk * Dh]`, v `[T, Hk * Dv]` of A or float32 to
        `[T, H * Dv]` of A. layer: index into the planes. Rows of padding may come out as anything
        finite."""

    def moe(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: Sequence[Matrix],
        down: Matrix,
        routing: Routing,
        correction: torch.Tensor | None,
        activation: str,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """`Ops.moe`: x `[T, D]` of A or float32, router_logits `[T, E]` of A or float32; gate_up:
        one stack `[E, 2 F, D]` of both parts, or one stack `[E, F, D]` for each; down: a stack
        `[E, D, F]`; correction float32 `[E]`, biases float32 `[E, 2 F]` and `[E, D]`; to float32
        `[T, D]`."""

    def lora(
        self, x: torch.Tensor, output: torch.Tensor, target: LoraTarget, batch: DeviceBatch
    ) -> None:
        """In place: `output += (x A^T) B^T` by the adapter slot of each token's sequence: x
        `[T, K]` and output `[T, N]`, of A or float32, N over all parts of the target."""

    def sample(self, logits: torch.Tensor, batch: DeviceSamplingBatch) -> SampledTensors:
        """Sample from float32 `[L, V]` as `SamplingBatch` specifies."""
