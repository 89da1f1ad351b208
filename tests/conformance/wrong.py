"""Devices to judge the kit by: the reference device with one defect each, and sound ones that are
unlike it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    CONTRACT_VERSION,
    AdapterRef,
    Backend,
    Batch,
    Capabilities,
    Device,
    DeviceInfo,
    Forward,
    Handle,
    KVScales,
    KVSpec,
    PendingOutputs,
    PendingTokens,
    Program,
    SamplingBatch,
    Shard,
    Weight,
    hookimpl,
)
from polysilicon.reference.device import ReferenceDevice
from polysilicon.reference.handles import ReferenceHandle, weights_of
from polysilicon.reference.ops import ReferenceOps
from polysilicon.reference.pools import Completed, ReferenceKVPool

Float32 = npt.NDArray[np.float32]


def as_bfloat16(array: Float32) -> Float32:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


class HalfPrecision(ReferenceOps):
    """As a GPU would: every value but the residual stream in bfloat16, products of bfloat16 with
    float32 accumulation."""

    def embed(self, table: Handle, tokens: npt.NDArray[np.int32]) -> Float32:
        return as_bfloat16(super().embed(table, tokens))

    def linear(self, x: Float32, weight: Handle, **named: Any) -> tuple[Float32, ...]:
        parts = super().linear(as_bfloat16(x), weight, **named)
        return tuple(as_bfloat16(part) for part in parts)

    def rms_norm(self, *arguments: Any, **named: Any) -> tuple[Float32, Float32]:
        normal, hidden = super().rms_norm(*arguments, **named)
        return as_bfloat16(normal), hidden

    def layer_norm(self, *arguments: Any, **named: Any) -> tuple[Float32, Float32]:
        normal, hidden = super().layer_norm(*arguments, **named)
        return as_bfloat16(normal), hidden

    def scale(self, x: Float32, factor: float) -> Float32:
        return as_bfloat16(super().scale(x, factor))

    def softcap(self, x: Float32, cap: float) -> Float32:
        return as_bfloat16(super().softcap(x, cap))

    def rope(self, *arguments: Any, **named: Any) -> Float32:
        return as_bfloat16(super().rope(*arguments, **named))

    def gated_act(self, gate: Float32, up: Float32, kind: str) -> Float32:
        return as_bfloat16(super().gated_act(gate, up, kind))

    def attention(self, *arguments: Any, **named: Any) -> Float32:
        return as_bfloat16(super().attention(*arguments, **named))

    def moe(self, *arguments: Any, **named: Any) -> Float32:
        return as_bfloat16(super().moe(*arguments, **named))


class RowByRow(ReferenceOps):
    """Products and attention a token at a time, so that nothing depends on how many there are."""

    def linear(self, x: Float32, weight: Handle, **named: Any) -> tuple[Float32, ...]:
        if not len(x) or named.get("adapters"):
            return super().linear(x, weight, **named)
        rows = [super(RowByRow, self).linear(row[None], weight, **named) for row in x]
        return tuple(np.concatenate(part) for part in zip(*rows, strict=True))

    def attention(
        self, q: Float32, k: Float32, v: Float32, *, batch: Batch, **named: Any
    ) -> Float32:
        together = super().attention(q, k, v, batch=batch, **named)
        if batch.tree_mask is not None or not named.get("causal", True):
            return together
        outputs = []
        for sequence, length in enumerate(np.diff(batch.query_start)):
            for index in range(length):
                row = int(batch.query_start[sequence]) + index
                alone = dataclasses.replace(
                    batch,
                    positions=batch.positions[row : row + 1],
                    query_start=np.array([0, 1], np.int32),
                    context_len=batch.context_len[sequence : sequence + 1] - length + index + 1,
                    page_tables=tuple(table[sequence:][:1] for table in batch.page_tables),
                )
                query = q[row : row + 1]
                outputs.append(super().attention(query, None, None, batch=alone, **named))
        return np.concatenate(outputs)


class WrongScale(ReferenceOps):
    """Attention's scale is two percent off."""

    def attention(self, *arguments: Any, scale: float, **named: Any) -> Float32:
        return super().attention(*arguments, scale=scale * 1.02, **named)


class OwnScales(ReferenceOps):
    """Calibrated scales of KV are not heeded."""

    def attention(
        self, *arguments: Any, kv_scales: KVScales | None = None, **named: Any
    ) -> Float32:
        return super().attention(*arguments, **named)


class HalfPrecisionProducts(ReferenceOps):
    """Products of bfloat16 inputs, though float32 was promised."""

    def linear(self, x: Float32, weight: Handle, **named: Any) -> tuple[Float32, ...]:
        rounded = ReferenceHandle(as_bfloat16(weights_of(weight)), weight.parts)
        return super().linear(as_bfloat16(x), rounded, **named)


class HalfPrecisionResidual(ReferenceOps):
    """The residual stream is kept in bfloat16."""

    def add(self, a: Float32, b: Float32) -> Float32:
        return as_bfloat16(super().add(a, b))


class OneAdapterForAll(ReferenceOps):
    """Every sequence gets the adapter of the first."""

    def lora(
        self, x: Float32, parts: tuple[Float32, ...], adapters: AdapterRef, batch: Batch
    ) -> tuple[Float32, ...]:
        first = np.full_like(batch.adapter_slot, batch.adapter_slot[0])
        return super().lora(x, parts, adapters, dataclasses.replace(batch, adapter_slot=first))


class WrongRoutingOnTies(ReferenceOps):
    """Equal scores prefer the higher expert."""

    def moe(self, x: Float32, router_logits: Float32, *handles: Handle, **named: Any) -> Float32:
        tilted = router_logits + np.arange(router_logits.shape[1], dtype=np.float32) * 1e-5
        return super().moe(x, tilted.astype(np.float32), *handles, **named)


class StaleSlotsPool(ReferenceKVPool):
    """A slot that holds a token is not written again before its page starts anew."""

    def __init__(self, spec: KVSpec, pages: int) -> None:
        super().__init__(spec, pages)
        self._held: dict[int, set[int]] = {layer: set() for layer in spec.layers}

    def store(
        self,
        layer: int,
        slots: npt.NDArray[np.int32],
        keys: Float32,
        values: Float32,
        scales: KVScales | None = None,
    ) -> None:
        held, size = self._held[layer], self.spec.page_size
        rows = []
        for row, slot in enumerate(int(slot) for slot in slots):
            if slot % size == 0:
                held -= set(range(slot, slot + size))
            if slot not in held:
                held.add(slot)
                rows.append(row)
        super().store(layer, slots[rows], keys[rows], values[rows], scales)


class SlotMajorPool(ReferenceKVPool):
    """Canonical blocks with slots before heads: consistent with itself, and with nobody else."""

    def read(self, pages: Sequence[int], into: npt.NDArray[np.uint8]) -> Completed[None]:
        super().read(pages, into)
        into[:] = self._transposed(into, lambda plane: (plane.heads, self.spec.block))
        return Completed(None)

    def write(self, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> Completed[None]:
        return super().write(
            pages, self._transposed(data, lambda plane: (self.spec.block, plane.heads))
        )

    def _transposed(self, data: npt.NDArray[np.uint8], shape: Any) -> npt.NDArray[np.uint8]:
        result, position = data.copy(), len(self.spec.block_header())
        for _ in self.spec.layers:
            for plane in self.spec.planes:
                row = plane.dim * self._planes[plane.name].itemsize
                size = plane.heads * self.spec.block * row
                part = data[..., position : position + size]
                swapped = part.reshape(*data.shape[:2], *shape(plane), row).swapaxes(2, 3)
                result[..., position : position + size] = swapped.reshape(part.shape)
                position += size
        return result


class WrongDevice(ReferenceDevice):
    """The reference device with ops of the defect's."""

    def __init__(self, ops: type[ReferenceOps] = ReferenceOps) -> None:
        super().__init__()
        self.ops = ops()


class WideWindow(WrongDevice):
    """A sliding window is one token wider than it should be."""

    def kv_pool(self, spec: KVSpec, pages: int) -> ReferenceKVPool:
        if spec.window is not None:
            spec = dataclasses.replace(spec, window=spec.window + 1)
        return super().kv_pool(spec, pages)


class WithPool(WrongDevice):
    """Pools of another class."""

    def __init__(self, pool: type[ReferenceKVPool]) -> None:
        super().__init__()
        self._pool = pool

    def kv_pool(self, spec: KVSpec, pages: int) -> ReferenceKVPool:
        return self._pool(spec, pages)


class Modest(WrongDevice):
    """A sound device that declares little: half precision, one page size, no extras."""

    def __init__(self) -> None:
        super().__init__(HalfPrecision)
        self.capabilities = Capabilities(
            compute="bf16",
            kv_dtypes=("f16",),
            page_sizes=(32,),
            encodings=("dense:bf16", "affine:4/*", "affine:8/32"),
        )


class Deterministic(WrongDevice):
    """Declares that results do not depend on batching."""

    def __init__(self, ops: type[ReferenceOps]) -> None:
        super().__init__(ops)
        self.capabilities = dataclasses.replace(self.capabilities, deterministic=True)


class HostTokensOnly(WrongDevice):
    """`token_source` is not looked at."""

    def compile(self, forward: Forward, *, hidden: Sequence[int] = ()) -> Program:
        program = super().compile(forward, hidden=hidden)

        def call(batch: Batch, previous: PendingTokens | None) -> PendingOutputs:
            unsourced = np.full_like(batch.token_source, -1)
            return program(dataclasses.replace(batch, token_source=unsourced), previous)

        return call


class KeyWithoutPosition(WrongDevice):
    """Noise that does not depend on the position drawn."""

    def sample(self, pending: PendingOutputs, batch: SamplingBatch) -> PendingTokens:
        return super().sample(
            pending, dataclasses.replace(batch, position=np.zeros_like(batch.position))
        )


class WeightsKept(WrongDevice):
    """The arrays given to `put` stay in use."""

    def put(self, parts: Sequence[Weight], shard: Shard | None = None) -> ReferenceHandle:
        handle = super().put(parts, shard)
        if len(parts) == 1 and shard is None:
            handle.array = parts[0].dequantize()
        return handle


DEVICES: dict[str, Any] = {
    "none": WrongDevice,
    "row-by-row": lambda: Deterministic(RowByRow),
    "modest": Modest,
    "attention-scale": lambda: WrongDevice(WrongScale),
    "window": WideWindow,
    "kv-scales": lambda: WrongDevice(OwnScales),
    "stale-page": lambda: WithPool(StaleSlotsPool),
    "bfloat16-products": lambda: WrongDevice(HalfPrecisionProducts),
    "bfloat16-residual": lambda: WrongDevice(HalfPrecisionResidual),
    "adapter-slot": lambda: WrongDevice(OneAdapterForAll),
    "routing-ties": lambda: WrongDevice(WrongRoutingOnTies),
    "page-layout": lambda: WithPool(SlotMajorPool),
    "token-source": HostTokensOnly,
    "noise-position": KeyWithoutPosition,
    "weights-kept": WeightsKept,
    "batch-dependence": lambda: Deterministic(ReferenceOps),
}


@dataclasses.dataclass(frozen=True)
class WrongBackend:
    """Opens one of `DEVICES`, by its name."""

    name: str
    contract: tuple[int, int] = CONTRACT_VERSION
    priority: int = 0

    def probe(self) -> Sequence[DeviceInfo]:
        return (DeviceInfo(name=self.name, memory=1 << 30),)

    def open(self, index: int, options: Mapping[str, str]) -> Device:
        if set(options) - {"deterministic"}:
            raise ValueError(f"unknown options: {', '.join(options)}")
        device: Device = DEVICES[self.name]()
        return device


@hookimpl
def polysilicon_backends() -> Sequence[Backend]:
    return tuple(WrongBackend(name) for name in DEVICES)
