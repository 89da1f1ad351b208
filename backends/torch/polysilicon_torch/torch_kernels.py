"""The kernels in plain torch operations: what a device on the host computes with.

Everything is computed in float32, and rounded to A where a card's kernels would round: inputs of
products, and what norms, activations and attention give. Weights are not, as in a card's products
of one row with quantised weights, which multiply them in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from polysilicon.backend import Routing, sample_on_host
from polysilicon_torch import torch_attention, torch_moe
from polysilicon_torch.adapters import LoraTarget
from polysilicon_torch.batches import DeviceBatch
from polysilicon_torch.kernels import AttentionSettings, DeviceRope
from polysilicon_torch.placed import DenseMatrix, Matrix
from polysilicon_torch.planes import KVPlanes
from polysilicon_torch.sampling import DeviceSamplingBatch, SampledTensors, on_host
from polysilicon_torch.tuning import Tuning


class TorchKernels:
    """See `polysilicon_torch.kernels.Kernels`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.dense_dtype = torch.float32
        self.keeps_codes = False
        self.tuning: Tuning | None = None

    def gather_tokens(
        self, tokens: torch.Tensor, source: torch.Tensor, previous: torch.Tensor
    ) -> None:
        taken = torch.nonzero(source >= 0).squeeze(1)
        tokens[taken] = previous[source[taken]]

    def embed(self, table: Matrix, tokens: torch.Tensor) -> torch.Tensor:
        return _values(table).index_select(0, tokens)

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(self._rounded(x), _values(matrix), bias)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = _sum(x, residual)
        normal = torch_attention.rms(hidden, eps) * weight
        return normal.to(self.dtype), hidden

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = _sum(x, residual)
        normal = functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
        return normal.to(self.dtype), hidden

    def gated_act(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return gated_act(gate.float(), up.float(), kind).to(self.dtype)

    def rope(
        self, x: torch.Tensor, positions: torch.Tensor, rope: DeviceRope, heads: int
    ) -> torch.Tensor:
        by_head = x.float().unflatten(-1, (heads, -1))
        return torch_attention.rotate(by_head, positions, rope).flatten(1).to(x.dtype)

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
        output = torch_attention.attention(q, k, v, batch, planes, layer, settings)
        return output.to(self.dtype)

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
        experts, weights = torch_moe.route(router_logits.float(), routing, correction)
        x, up_values = self._rounded(x), [_values(stack) for stack in gate_up]
        output = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows, choice = (experts == expert).nonzero(as_tuple=True)
            inner = torch.cat([x[rows] @ stack[expert].T for stack in up_values], dim=-1)
            if gate_up_bias is not None:
                inner += gate_up_bias[expert]
            gate, up = inner.chunk(2, dim=-1)
            result = self._rounded(gated_act(gate, up, activation)) @ _values(down)[expert].T
            if down_bias is not None:
                result += down_bias[expert]
            output.index_add_(0, rows, result * weights[rows, choice, None])
        return output

    def lora(
        self, x: torch.Tensor, output: torch.Tensor, target: LoraTarget, batch: DeviceBatch
    ) -> None:
        sequence = batch.token_sequence
        slots = batch.adapter_slot[sequence.clamp(min=0)].where(sequence >= 0, 0)
        for slot in slots.unique().tolist():
            first = 0
            rows = torch.nonzero(slots == slot).squeeze(1)
            for part, size in enumerate(target.outputs):
                columns = slice(first, first + size)
                first += size
                rank = int(target.ranks[slot, part])
                if not rank:
                    continue
                down = target.down[slot, part, :rank].float()
                up = target.up[slot, columns, :rank].float()
                change = self._rounded(self._rounded(x[rows]) @ down.T) @ up.T
                output[rows, columns] += change.to(output.dtype)

    def sample(self, logits: torch.Tensor, batch: DeviceSamplingBatch) -> SampledTensors:
        sampled = sample_on_host(logits.numpy(), on_host(batch))
        return SampledTensors(
            tokens=torch.from_numpy(sampled.tokens),
            logprobs=_tensor(sampled.logprobs),
            target_logprobs=_tensor(sampled.target_logprobs),
            top_ids=_tensor(sampled.top_ids),
            top_logprobs=_tensor(sampled.top_logprobs),
        )

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x rounded to A, in float32."""
        return x.to(self.dtype).float()


def gated_act(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """`Ops.gated_act` in float32."""
    if kind == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if kind == "silu":
        return functional.silu(gate) * up
    if kind == "relu":
        return functional.relu(gate) * up
    return functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def _sum(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x.float() if residual is None else x.float() + residual


def _values(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, DenseMatrix), "quantised weights are placed dequantised here"
    return matrix.values


def _tensor(array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)
