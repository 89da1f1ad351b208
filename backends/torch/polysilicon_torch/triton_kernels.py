"""The kernels in Triton, and the library's products for dense matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from polysilicon.backend import Routing
from polysilicon_torch.adapters import LoraTarget
from polysilicon_torch.batches import DeviceBatch
from polysilicon_torch.kernels import AttentionSettings, DeviceRope
from polysilicon_torch.placed import DenseMatrix, Matrix
from polysilicon_torch.planes import KVPlanes
from polysilicon_torch.sampling import DeviceSamplingBatch, SampledTensors
from polysilicon_torch.triton import (
    activations,
    attention,
    dequantize,
    embed,
    fp8_products,
    lora,
    moe,
    norms,
    packed_products,
    rope,
    sampling,
)
from polysilicon_torch.tuning import Tuning


class TritonKernels:
    """See `polysilicon_torch.kernels.Kernels`. device: a card, or the host, where Triton was
    imported as its interpreter. fp8: products with e4m3 weights round their inputs to e4m3 where
    the target multiplies those."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, tuning: Tuning, *, fp8: bool = False
    ) -> None:
        self.dtype = dtype
        self.dense_dtype = dtype
        self.keeps_codes = True
        self.tuning = tuning
        self._wide_products = _has_wide_products(dtype, device)
        self._fp8 = fp8

    def gather_tokens(
        self, tokens: torch.Tensor, source: torch.Tensor, previous: torch.Tensor
    ) -> None:
        embed.gather_tokens(tokens, source, previous, tuning=self.tuning)

    def embed(self, table: Matrix, tokens: torch.Tensor) -> torch.Tensor:
        return embed.embed(table, tokens, tuning=self.tuning)

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        x = x.to(self.dtype)
        if isinstance(matrix, DenseMatrix):
            return self._dense(x, matrix.values, bias)
        if self._fp8 and fp8_products.takes_fp8_product(matrix, self.tuning.target):
            return fp8_products.fp8_product(
                x, matrix, bias=bias, out_dtype=torch.float32, tuning=self.tuning
            )
        if len(x) >= dequantize.MANY_ROWS:
            values = dequantize.dequantize(matrix, dtype=self.dtype, tuning=self.tuning)
            return self._dense(x, values, bias)
        return packed_products.packed_product(
            x, matrix, bias=bias, out_dtype=torch.float32, tuning=self.tuning
        )

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norms.rms_norm(x, weight, eps, residual, dtype=self.dtype, tuning=self.tuning)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norms.layer_norm(
            x, weight, bias, eps, residual, dtype=self.dtype, tuning=self.tuning
        )

    def gated_act(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        return activations.gated_act(gate, up, kind, dtype=self.dtype, tuning=self.tuning)

    def rope(
        self, x: torch.Tensor, positions: torch.Tensor, rope_: DeviceRope, heads: int
    ) -> torch.Tensor:
        return rope.rope(x, positions, rope_, heads, tuning=self.tuning)

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
        return attention.attention(
            q, k, v, batch, planes, layer, settings, dtype=self.dtype, tuning=self.tuning
        )

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
        return moe.moe(
            x.to(self.dtype),
            router_logits,
            gate_up,
            down,
            routing,
            correction,
            activation,
            gate_up_bias,
            down_bias,
            tuning=self.tuning,
        )

    def lora(
        self, x: torch.Tensor, output: torch.Tensor, target: LoraTarget, batch: DeviceBatch
    ) -> None:
        lora.lora(x, output, target, batch, tuning=self.tuning)

    def sample(self, logits: torch.Tensor, batch: DeviceSamplingBatch) -> SampledTensors:
        return sampling.sample(logits, batch, tuning=self.tuning)

    def _dense(
        self,
        x: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.dtype == torch.float32:
            return functional.linear(x, values, bias)
        if self._wide_products:
            output = torch.mm(x, values.T, out_dtype=torch.float32)
        elif x.is_cpu:
            output = functional.linear(x.float(), values.float())
        else:
            output = functional.linear(x, values).float()
        return output if bias is None else output.add_(bias)


def _has_wide_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library gives products of A in float32, without rounding them to A."""
    tile = torch.zeros((16, 16), dtype=dtype, device=device)
    try:
        torch.mm(tile, tile, out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True
