"""Our kernels beside torch's: attention beside `scaled_dot_product_attention`, products with packed
weights beside `matmul` in bf16. Operands together are larger than the second-level cache."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import random_model
import torch
from measuring import Record, arguments, open_device, seconds_each, torch_device
from torch.nn import functional

from polysilicon.backend import KVSpec, Weight, kv_planes
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon_torch.batches import Buckets, DeviceBatch, StepBuffer
from polysilicon_torch.device import TorchDevice
from polysilicon_torch.handles import matrix_of
from polysilicon_torch.kernels import AttentionSettings
from polysilicon_torch.pools import TorchKVPool

HEADS, KEY_HEADS, DIM, PAGE = 32, 8, 128, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """decodes: batch and context. products: outputs and inputs. cache: bytes that operands must
    exceed together."""

    decodes: tuple[tuple[int, int], ...] = ((1, 2048), (1, 16384), (8, 8192), (64, 2048))
    prefills: tuple[int, ...] = (2048, 16384)
    products: tuple[tuple[int, int], ...] = ((6144, 4096), (28672, 4096), (4096, 14336))
    rows: tuple[int, ...] = (1, 8, 64, 512, 4096)
    cache: int = 256 << 20


DRY = Sizes(decodes=((1, 64), (3, 40)), prefills=(48,), products=((96, 256),), rows=(1, 5), cache=1)


class AttentionBench:
    """Sequences whose context lies in a pool of its own, filled with random numbers."""

    def __init__(self, device: TorchDevice, kv_dtype: str, lengths: list[tuple[int, int]]) -> None:
        """lengths: tokens of the step, and of the context with them, of each sequence."""
        self._kernels, self._runtime = device.kernels, device.runtime
        pages = [-(-context // PAGE) for _, context in lengths]
        planes = kv_planes(heads=KEY_HEADS, key_dim=DIM, value_dim=DIM, dtype=kv_dtype)
        spec = KVSpec(group=0, name="full", layers=(0,), window=None, planes=planes, page_size=PAGE)
        self.pool = device.kv_pool(spec, sum(pages) + 1)
        assert isinstance(self.pool, TorchKVPool)
        for tensor in (self.pool.planes.k, self.pool.planes.v):
            noise = torch.randn(1 << 20, device=tensor.device).to(tensor.dtype)
            tensor.view(-1).copy_(noise.repeat(-(-tensor.numel() // len(noise)))[: tensor.numel()])
        for scales in (self.pool.planes.k_scale, self.pool.planes.v_scale):
            if scales is not None:
                scales.fill_(0.02 if kv_dtype == "int8" else 1.0)
        first, chunks = 1, []
        for (query, context), count in zip(lengths, pages, strict=True):
            chunks.append(
                Chunk(
                    tokens=[0] * query,
                    start=context - query,
                    pages=[list(range(first, first + count))],
                )
            )
            first += count
        batch = make_batch(chunks, [PAGE])
        buffer = StepBuffer(self._runtime, Buckets.of(batch))
        buffer.fill(batch)
        self.batch: DeviceBatch = buffer.batch
        self._buffer = buffer
        self.tokens = sum(query for query, _ in lengths)
        self.context = sum(context for _, context in lengths)

    def call(self) -> Callable[[], Any]:
        rows, where = self.batch.tokens_padded, self._runtime.device
        dtype = self._kernels.dtype
        q = torch.randn(rows, HEADS * DIM, device=where).to(dtype)
        k, v = (torch.randn(rows, KEY_HEADS * DIM, device=where).to(dtype) for _ in range(2))
        settings = AttentionSettings(heads=HEADS, scale=DIM**-0.5)
        planes = self.pool.planes
        return lambda: self._kernels.attention(q, k, v, self.batch, planes, 0, settings)


def measure_attention(
    record: Record, device: TorchDevice, sizes: Sizes, where: torch.device
) -> None:
    for kv_dtype in ("bf16", "fp8_e4m3", "int8"):
        for batch, context in sizes.decodes:
            names = {"case": "attention_decode", "batch": batch, "context": context}
            with record.case(**names, kv=kv_dtype) as figures:
                bench = AttentionBench(device, kv_dtype, [(1, context)] * batch)
                seconds = seconds_each([bench.call()] * 8, where)
                size = bench.pool.spec.page_bytes / PAGE * bench.context
                figures |= {"us": 1e6 * seconds, "bytes_per_s": size / seconds}
                bench.pool.close()
        for prompt in sizes.prefills:
            with record.case(case="attention_prefill", prompt=prompt, kv=kv_dtype) as figures:
                bench = AttentionBench(device, kv_dtype, [(prompt, prompt)])
                seconds = seconds_each([bench.call()] * 2, where)
                flops = 2 * HEADS * DIM * prompt * prompt
                figures |= {"us": 1e6 * seconds, "flops_per_s": flops / seconds}
                bench.pool.close()
    for batch, context in sizes.decodes:
        names = {"case": "attention_decode", "batch": batch, "context": context}
        with record.case(**names, kv="torch") as figures:
            q, k, v = _operands(batch, 1, context, where)
            seconds = seconds_each([functools.partial(_sdpa, q, k, v, causal=False)] * 8, where)
            figures |= {"us": 1e6 * seconds, "bytes_per_s": (k.nbytes + v.nbytes) / seconds}
    for prompt in sizes.prefills:
        with record.case(case="attention_prefill", prompt=prompt, kv="torch") as figures:
            q, k, v = _operands(1, prompt, prompt, where)
            seconds = seconds_each([functools.partial(_sdpa, q, k, v, causal=True)] * 2, where)
            flops = 2 * HEADS * DIM * prompt * prompt
            figures |= {"us": 1e6 * seconds, "flops_per_s": flops / seconds}


def _operands(
    batch: int, query: int, context: int, where: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((HEADS, query), (KEY_HEADS, context), (KEY_HEADS, context))
    q, k, v = (
        torch.randn(batch, heads, length, DIM, device=where, dtype=torch.bfloat16)
        for heads, length in shapes
    )
    return q, k, v


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def measure_products(
    record: Record, device: TorchDevice, sizes: Sizes, where: torch.device
) -> None:
    for outputs, inputs in sizes.products:
        for name, encode in random_model.ENCODINGS.items():
            weight = encode((outputs, inputs))
            count = max(1, -(-sizes.cache // weight.nbytes))
            handles = [matrix_of(device.put([weight]), name) for _ in range(count)]
            ours = [
                functools.partial(
                    device.kernels.linear, matrix=handle.products[0].matrix, bias=None
                )
                for handle in handles
            ]
            _time_products(record, sizes, where, name, weight, ours)
            del handles, ours
        weight = random_model.dense((outputs, inputs))
        values = torch.randn(outputs, inputs, device=where).to(torch.bfloat16)
        copies = [values.clone().T for _ in range(max(1, -(-sizes.cache // weight.nbytes)))]
        torchs = [functools.partial(torch.matmul, other=copy) for copy in copies]
        _time_products(record, sizes, where, "torch", weight, torchs)


def _time_products(
    record: Record,
    sizes: Sizes,
    where: torch.device,
    name: str,
    weight: Weight,
    multiply: Sequence[Callable[[torch.Tensor], torch.Tensor]],
) -> None:
    outputs, inputs = weight.shape
    for rows in sizes.rows:
        names = {"case": "product", "outputs": outputs, "inputs": inputs, "rows": rows}
        with record.case(**names, weights=name) as figures:
            x = torch.randn(rows, inputs, device=where).to(torch.bfloat16)
            calls = [functools.partial(each, x) for each in multiply]
            seconds = seconds_each(calls, where, least=0.02)
            figures |= {
                "us": 1e6 * seconds,
                "bytes_per_s": weight.nbytes / seconds,
                "flops_per_s": 2 * rows * outputs * inputs / seconds,
            }


def main() -> int:
    chosen = arguments()
    sizes, where = DRY if chosen.dry else Sizes(), torch_device(chosen.dry)
    record = Record(chosen.out)
    device = open_device(chosen.dry)
    assert isinstance(device, TorchDevice)
    measure_products(record, device, sizes, where)
    measure_attention(record, device, sizes, where)
    device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
