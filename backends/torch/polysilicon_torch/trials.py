"""What a tuner may choose: kernels at the shapes that matter, and how to launch them there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from polysilicon.backend import Batch, GroupAffine, GroupFloat, Weight
from polysilicon_torch.batches import Buckets, StepBuffer
from polysilicon_torch.kernels import AttentionSettings
from polysilicon_torch.packing import place_matrices
from polysilicon_torch.placed import PackedMatrix
from polysilicon_torch.planes import KVPlanes
from polysilicon_torch.runtime import Runtime
from polysilicon_torch.target import Target
from polysilicon_torch.triton.attention import attention
from polysilicon_torch.triton.fp8_products import fp8_product, takes_fp8_product
from polysilicon_torch.triton.packed_codes import run_of
from polysilicon_torch.triton.packed_products import packed_product
from polysilicon_torch.tuning import Tuning

Bounds = tuple[float, float]

_ATTENTION_SPACE = {
    "BLOCK_M": (32, 64, 128),
    "BLOCK_N": (16, 32, 64, 128),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "programs": (1, 2, 3, 4),
    "waves_per_eu": (0, 1, 2, 3),
}
_PRODUCT_SPACE = {
    "BLOCK_M": (8, 16, 32, 64, 128),
    "BLOCK_N": (16, 32, 64, 128),
    "BLOCK_K": (32, 64, 128, 256, 512, 1024),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4, 5),
    "waves_per_eu": (0, 1, 2, 3),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A kernel at one class of shapes.

    shape: the numbers to ask the tables with. when: the class that a choice is kept for. space:
    values to try of each key that the tables choose. launches: what is timed; together they touch
    more memory than a cache holds.
    """

    kernel: str
    shape: Mapping[str, int]
    when: Mapping[str, Bounds]
    space: Mapping[str, Sequence[int]]
    launches: Sequence[Callable[[Tuning], object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the operands. cache: bytes that they exceed together. context: tokens of a sequence."""

    outputs: int = 8192
    inputs: int = 4096
    rows: tuple[int, ...] = (1, 8, 16, 64, 256)
    sequences: int = 8
    context: int = 4096
    heads: int = 32
    key_heads: int = 8
    dims: tuple[int, ...] = (64, 128, 256)
    cache: int = 256 << 20


def trials(
    runtime: Runtime, dtype: torch.dtype, target: Target, sizes: Sizes | None = None
) -> Iterator[Trial]:
    """All of them, each with its operands on the device, which live as long as it does."""
    sizes = sizes or Sizes()
    yield from _products(runtime, dtype, target, sizes)
    for dim in sizes.dims:
        yield _attention(runtime, dtype, sizes, "attention_decode", dim, "bf16")
        yield _attention(runtime, dtype, sizes, "attention_decode", dim, "fp8_e4m3")
        yield _attention(runtime, dtype, sizes, "attention_prefill", dim, "bf16")


def _products(
    runtime: Runtime, dtype: torch.dtype, target: Target, sizes: Sizes
) -> Iterator[Trial]:
    shape = sizes.outputs, sizes.inputs
    for weight in (
        _affine(shape, 4, 128),
        _affine(shape, 4, 32),
        _affine(shape, 8, 32),
        _fp8(shape),
    ):
        matrices = [
            _placed(weight, dtype, runtime.device)
            for _ in range(max(1, -(-sizes.cache // weight.nbytes)))
        ]
        first = matrices[0]
        native = takes_fp8_product(first, target)
        launcher, kernel = (
            (fp8_product, "fp8_product") if native else (packed_product, "packed_product")
        )
        run = run_of(first.group)
        numbers = {"outputs": shape[0], "inputs": shape[1], "run": run, "bits": first.bits}
        when: dict[str, Bounds] = {"run": (run, run)}
        if not native:
            numbers["bytes"] = dtype.itemsize
            when |= {"bits": (first.bits, first.bits), "bytes": (dtype.itemsize, dtype.itemsize)}
        low = 1
        for rows in sizes.rows:
            high = rows if rows != sizes.rows[-1] else float("inf")
            x = torch.randn(rows, shape[1], device=runtime.device).to(dtype)
            yield Trial(
                kernel=kernel,
                shape={**numbers, "rows": rows},
                when={**when, "rows": (low, high)},
                space=_PRODUCT_SPACE,
                launches=[functools.partial(_multiply, launcher, x, matrix) for matrix in matrices],
            )
            low = rows + 1


def _multiply(
    launcher: Callable[..., torch.Tensor], x: torch.Tensor, matrix: PackedMatrix, tuning: Tuning
) -> torch.Tensor:
    return launcher(x, matrix, bias=None, out_dtype=x.dtype, tuning=tuning)


def _placed(weight: Weight, dtype: torch.dtype, device: torch.device) -> PackedMatrix:
    ((matrix, _),) = place_matrices([weight], None, dtype=dtype, device=device, keep_codes=True)
    assert isinstance(matrix, PackedMatrix)
    return matrix


def _affine(shape: tuple[int, int], bits: int, group: int) -> Weight:
    rows, columns = shape
    random = np.random.default_rng(bits)
    return GroupAffine(
        shape=shape,
        bits=bits,
        group=group,
        codes=random.integers(0, 256, (rows, columns * bits // 8), np.uint8),
        scale=np.full((rows, columns // group), 0.01, np.float16),
        offset=1 << (bits - 1),
    )


def _fp8(shape: tuple[int, int]) -> Weight:
    rows, columns = shape
    codes = np.random.default_rng(1).integers(0, 0x78, (rows, columns), np.uint8)
    scale = np.full((rows, 1), 0.001, np.float32)
    return GroupFloat(shape=shape, format="f8_e4m3", group=columns, codes=codes, scale=scale)


def _attention(
    runtime: Runtime, dtype: torch.dtype, sizes: Sizes, kernel: str, dim: int, kv: str
) -> Trial:
    """Decode of some sequences, or prefill of one."""
    decoding = kernel == "attention_decode"
    sequences, query = (sizes.sequences, 1) if decoding else (1, sizes.context)
    page_size = 16
    pages = -(-sizes.context // page_size)
    device, kv_dtype = runtime.device, {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[kv]
    plane = (1, sequences * pages + 1, sizes.key_heads, page_size, dim)
    k, v = (torch.randn(plane, device=device).to(kv_dtype) for _ in range(2))
    scales = torch.ones(plane[:-1], device=device) if kv == "fp8_e4m3" else None
    planes = KVPlanes(
        k=k,
        v=v,
        k_scale=scales,
        v_scale=scales,
        dtype=kv,
        group=0,
        window=None,
        page_size=page_size,
    )
    buffer = _step(runtime, sequences, query, sizes.context, pages, page_size)
    batch, settings = buffer.batch, AttentionSettings(heads=sizes.heads, scale=dim**-0.5)
    q = torch.randn(batch.tokens_padded, sizes.heads * dim, device=device).to(dtype)

    def launch(tuning: Tuning, buffer: StepBuffer = buffer) -> torch.Tensor:
        return attention(q, None, None, batch, planes, 0, settings, dtype=dtype, tuning=tuning)

    size, kv_size = dtype.itemsize, kv_dtype.itemsize
    below = {64: 0, 128: 65, 256: 129}
    when: dict[str, Bounds] = {
        "dim": (below.get(dim, dim), dim),
        "bytes": (size, size),
        "kv_bytes": (kv_size, kv_size),
    }
    return Trial(
        kernel=kernel,
        shape={"dim": dim, "bytes": size, "kv_bytes": kv_size},
        when=when,
        space=_ATTENTION_SPACE,
        launches=[launch],
    )


def _step(
    runtime: Runtime, sequences: int, query: int, context: int, pages: int, page_size: int
) -> StepBuffer:
    """Sequences whose pages follow one another, the last `query` tokens of each in the step."""
    counts = np.arange(sequences + 1, dtype=np.int32)
    table = 1 + np.arange(sequences * pages, dtype=np.int32).reshape(sequences, pages)
    positions = np.tile(np.arange(context - query, context, dtype=np.int32), sequences)
    owners = np.repeat(np.arange(sequences), query)
    slots = table[owners, positions // page_size] * page_size + positions % page_size
    zeros = np.zeros(sequences, np.int32)
    batch = Batch(
        tokens=np.zeros(sequences * query, np.int32),
        token_source=np.full(sequences * query, -1, np.int32),
        positions=positions,
        query_start=counts * query,
        context_len=zeros + context,
        page_tables=(table,),
        slots=(slots.astype(np.int32),),
        logit_rows=zeros[:1],
        sequence_slot=counts[:-1],
        adapter_slot=zeros,
    )
    buffer = StepBuffer(runtime, Buckets.of(batch))
    buffer.fill(batch)
    return buffer
