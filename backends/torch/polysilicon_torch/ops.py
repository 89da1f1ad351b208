"""The operations, run at once on tensors: what a forward calls, over a device's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from polysilicon.backend import (
    AdapterRef,
    Batch,
    Handle,
    KVPool,
    KVScales,
    Normalization,
    Ops,
    Rope,
    Routing,
)
from polysilicon_torch.adapters import TorchAdapterPool
from polysilicon_torch.angles import turns_of
from polysilicon_torch.handles import matrix_of, stack_of, vector_of
from polysilicon_torch.kernels import AttentionSettings, DeviceRope, HeadNorm, Kernels
from polysilicon_torch.pools import TorchKVPool

if TYPE_CHECKING:
    from polysilicon_torch.batches import DeviceBatch

Resource = TorchKVPool | TorchAdapterPool


class TorchOps(Ops):
    """Values are tensors; a batch is a `DeviceBatch`, whatever the signatures say.

    The residual stream and the outputs of products are float32, which brings bfloat16's
    log-probabilities as near again to those of float32; what norms, activations and attention give
    is of the activation dtype A.

    used: the pools that ops were given, noted while it is not None.
    """

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device
        self._ropes: dict[Rope, DeviceRope] = {}
        self._kv_scales: dict[KVScales, tuple[torch.Tensor, torch.Tensor]] = {}
        self.used: set[Resource] | None = None

    def embed(self, table: Handle, tokens: torch.Tensor) -> torch.Tensor:
        products = matrix_of(table, "an embedding table").products
        if len(products) > 1:
            raise ValueError("an embedding table is of one part")
        return self._kernels.embed(products[0].matrix, tokens)

    def linear(
        self,
        x: torch.Tensor,
        weight: Handle,
        *,
        bias: Handle | None = None,
        adapters: AdapterRef | None = None,
        batch: Batch | None = None,
    ) -> tuple[torch.Tensor, ...]:
        handle = matrix_of(weight, "the weight of linear")
        if x.shape[-1] != handle.inputs:
            raise ValueError(f"linear takes {handle.inputs} inputs, got {x.shape[-1]}")
        vector = None if bias is None else vector_of(bias, "a bias", sum(handle.parts))
        outputs, first = [], 0
        for product in handle.products:
            rows = sum(product.parts)
            own_bias = None if vector is None else vector[first : first + rows]
            outputs.append(self._kernels.linear(x, product.matrix, own_bias))
            first += rows
        if adapters is not None:
            if batch is None:
                raise ValueError("linear needs the batch to apply adapters")
            output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
            self._add_adapters(x, output, adapters, batch)
            return output.split(handle.parts, dim=-1)
        return tuple(
            part
            for output, product in zip(outputs, handle.products, strict=True)
            for part in output.split(product.parts, dim=-1)
        )

    def rms_norm(
        self, x: torch.Tensor, weight: Handle, *, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = vector_of(weight, "the weight of a norm", x.shape[-1])
        return self._kernels.rms_norm(x, scales, eps, _stream(residual))

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: Handle,
        bias: Handle | None = None,
        *,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = x.shape[-1]
        scales = vector_of(weight, "the weight of a norm", width)
        shifts = None if bias is None else vector_of(bias, "the bias of a norm", width)
        return self._kernels.layer_norm(x, scales, shifts, eps, _stream(residual))

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape != b.shape:
            raise ValueError(f"add takes equal shapes, got {tuple(a.shape)} and {tuple(b.shape)}")
        return a.float() + b.float()

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x.float() * factor

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return torch.tanh(x.float() / cap) * cap

    def rope(
        self, x: torch.Tensor, positions: torch.Tensor, rope: Rope, *, heads: int
    ) -> torch.Tensor:
        _check_heads(x, heads)
        return self._kernels.rope(x, positions, self._rope(rope), heads)

    def gated_act(self, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        if kind not in ACTIVATIONS:
            raise ValueError(f"unknown activation {kind!r}")
        return self._kernels.gated_act(gate, up, kind)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        *,
        batch: Batch,
        pool: KVPool,
        layer: int,
        heads: int,
        scale: float,
        rope: Rope | None = None,
        q_norm: Normalization | None = None,
        k_norm: Normalization | None = None,
        softcap: float | None = None,
        sinks: Handle | None = None,
        causal: bool = True,
        kv_scales: KVScales | None = None,
    ) -> torch.Tensor:
        assert isinstance(pool, TorchKVPool), "a KV pool of another device"
        self._note(pool)
        planes, width = pool.planes, _check_heads(q, heads)
        if (k is None) != (v is None):
            raise ValueError("attention takes both k and v, or neither")
        key_heads, key_dim = planes.k.shape[2], planes.k.shape[4]
        if heads % key_heads or width != key_dim:
            raise ValueError(
                f"queries of {heads} heads of {width} do not fit the pool's {key_heads} of "
                f"{key_dim}"
            )
        key_scales = value_scales = None
        if kv_scales is not None and planes.dtype == "fp8_e4m3":
            key_scales, value_scales = self._scales_of(kv_scales, key_heads)
        settings = AttentionSettings(
            heads=heads,
            scale=scale,
            rope=None if rope is None else self._rope(rope),
            q_norm=_head_norm(q_norm, width),
            k_norm=_head_norm(k_norm, width),
            softcap=softcap,
            sinks=None if sinks is None else vector_of(sinks, "sinks", heads),
            causal=causal,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        place = pool.layer_place(layer)
        return self._kernels.attention(q, k, v, _placed(batch), planes, place, settings)

    def moe(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: Handle,
        down: Handle,
        *,
        routing: Routing,
        activation: str,
        gate_up_bias: Handle | None = None,
        down_bias: Handle | None = None,
    ) -> torch.Tensor:
        if routing.scoring not in SCORINGS:
            raise ValueError(f"unknown routing {routing.scoring!r}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}")
        [down_product] = stack_of(down, "the experts' down weight").products
        correction = None
        if routing.correction is not None:
            experts = router_logits.shape[-1]
            correction = vector_of(routing.correction, "the routing correction", experts)
        return self._kernels.moe(
            x,
            router_logits,
            [p.matrix for p in stack_of(gate_up, "the experts' gate and up weights").products],
            down_product.matrix,
            routing,
            correction,
            activation,
            None if gate_up_bias is None else _expert_bias(gate_up_bias),
            None if down_bias is None else _expert_bias(down_bias),
        )

    def lora(
        self,
        x: torch.Tensor,
        parts: tuple[torch.Tensor, ...],
        adapters: AdapterRef,
        batch: Batch,
    ) -> tuple[torch.Tensor, ...]:
        output = torch.cat(parts, dim=-1)
        self._add_adapters(x, output, adapters, batch)
        return output.split([part.shape[-1] for part in parts], dim=-1)

    def select(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _add_adapters(
        self, x: torch.Tensor, output: torch.Tensor, adapters: AdapterRef, batch: Batch
    ) -> None:
        """In place."""
        pool = adapters.pool
        assert isinstance(pool, TorchAdapterPool), "an adapter pool of another device"
        self._note(pool)
        self._kernels.lora(x, output, pool.target(adapters.target), _placed(batch))

    def _rope(self, rope: Rope) -> DeviceRope:
        if rope not in self._ropes:
            frequencies = torch.tensor(rope.frequencies, dtype=torch.float32)
            self._ropes[rope] = DeviceRope(
                dim=rope.dim,
                frequencies=frequencies.to(self._device),
                turns=turns_of(rope.frequencies).to(self._device),
                scale=rope.scale,
                interleaved=rope.interleaved,
            )
        return self._ropes[rope]

    def _scales_of(self, scales: KVScales, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (len(scales.k), len(scales.v)) != (heads, heads):
            raise ValueError(
                f"{len(scales.k)} scales of k and {len(scales.v)} of v for {heads} heads"
            )
        if scales not in self._kv_scales:
            k, v = torch.tensor((scales.k, scales.v), dtype=torch.float32).to(self._device)
            self._kv_scales[scales] = k, v
        return self._kv_scales[scales]

    def _note(self, resource: Resource) -> None:
        if self.used is not None:
            self.used.add(resource)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")
SCORINGS = ("softmax", "softmax_top_k", "sigmoid")


def check_resources(resources: Iterable[Resource]) -> None:
    """Raise DeviceError where one of them is closed."""
    for resource in resources:
        resource.check_open()


def _placed(batch: Any) -> DeviceBatch:
    placed: DeviceBatch = batch
    return placed


def _stream(residual: torch.Tensor | None) -> torch.Tensor | None:
    return None if residual is None else residual.float()


def _check_heads(x: torch.Tensor, heads: int) -> int:
    """The width of a head."""
    columns = int(x.shape[-1])
    if columns % heads:
        raise ValueError(f"{columns} columns are not a whole number of {heads} heads")
    return columns // heads


def _head_norm(norm: Normalization | None, width: int) -> HeadNorm | None:
    if norm is None:
        return None
    return HeadNorm(weight=vector_of(norm.weight, "the weight of a head norm", width), eps=norm.eps)


def _expert_bias(handle: Handle) -> torch.Tensor:
    """float32 `[E, N]`: the biases of experts are placed as a dense matrix."""
    return matrix_of(handle, "the experts' bias").float_values()
