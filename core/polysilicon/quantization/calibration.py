"""Running a model on a calibration text, one linear at a time.

All calibration tokens go through the model in one batch, so a linear sees every input that it will
ever see in one call: it can be quantised there and then, and what follows is computed from what it
became. An expert sees those of the tokens that its router sends to it. Weights are read when they
are needed and let go of afterwards; what stays in memory is the residual stream behind every layer,
float32: for `MAX_TOKENS` tokens and 32 layers of width 4096 about 8 GiB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from polysilicon.backend import (
    AdapterRef,
    Batch,
    Dense,
    Handle,
    KVPool,
    KVSpec,
    Pending,
    Weight,
)
from polysilicon.errors import ConfigError
from polysilicon.models.config import kv_groups
from polysilicon.models.decoder import build_decoder
from polysilicon.models.model import Model
from polysilicon.ops import Routing
from polysilicon.quantization.expanded_attention import ExpandedAttention, expanded
from polysilicon.quantization.source import ModelSource
from polysilicon.reference.device import ReferenceDevice
from polysilicon.reference.handles import ReferenceHandle, weights_of
from polysilicon.reference.moe import route
from polysilicon.reference.ops import ReferenceOps
from polysilicon.tokenizer import Tokenizer
from polysilicon.weights.encodings import Float32

MAX_TOKENS = 1 << 14
"""Tokens of a calibration text that are used."""

_SEQUENCE_TOKENS = 512
_PAGE_TOKENS = 16


class Linears(Protocol):
    """What quantises the linears of a model that is run."""

    def table(self, key: str, rows: npt.NDArray[np.int64]) -> Float32:
        """Rows of the embedding table."""

    def visit(
        self, keys: Sequence[str], x: Float32, expert: int | None = None
    ) -> Sequence[Float32]:
        """Take the inputs `[T, K]` of the fused matrices of `keys`; give what they are from now on,
        `[N_i, K]` each. expert: whose, where the keys are of stacks; T may then be 0."""

    def mixture(self, keys: Sequence[str], x: Float32) -> None:
        """Take what goes into a mixture of experts, `[T, K]`, before each visit with the inputs of
        one of them. keys: of the stacks that read it."""


def calibration_sequences(tokenizer: Tokenizer, text: str, length: int) -> list[list[int]]:
    """A text as token ids, in sequences of at most `length` tokens, 512 and `MAX_TOKENS` in all.

    Raises ConfigError for a text of fewer than 2 tokens.
    """
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    step = max(1, min(_SEQUENCE_TOKENS, length) - len(begin))
    sequences = [
        [*begin, *ids[start : start + step]] for start in range(0, min(len(ids), MAX_TOKENS), step)
    ]
    if len(ids) < 2:
        raise ConfigError("the calibration text has fewer than 2 tokens: give a longer one")
    return sequences


def run(source: ModelSource, sequences: Sequence[Sequence[int]], linears: Linears) -> None:
    """Run the model on all sequences; `linears` is asked for every matrix, in the model's order,
    but for those that a family computes others from: they are taken as they are."""
    device = ReferenceDevice()
    config, weights = source.config, _Vectors(source, device)
    model: Model
    if config.latent is None:
        model = source.family.build(config, weights)
        specs = model.kv_specs(_PAGE_TOKENS, "f32")
    else:
        model = build_decoder(config, weights, attention=ExpandedAttention)
        specs = kv_groups(expanded(config, config.latent), _PAGE_TOKENS, "f32")
    model.bind([_Place(spec) for spec in specs])
    batch, pages = _batch(sequences, len(specs))
    pools = [device.kv_pool(dataclasses.replace(spec, layers=(0,)), pages) for spec in specs]
    with np.errstate(all="ignore"):
        model.forward(_CalibrationOps(linears, pools), batch)
    device.close()


def _batch(sequences: Sequence[Sequence[int]], groups: int) -> tuple[Batch, int]:
    """All sequences as one prefill without logits, and the pages that it takes."""
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    width = -(-int(lengths.max()) // _PAGE_TOKENS)
    table = np.arange(1, 1 + len(lengths) * width, dtype=np.int32).reshape(len(lengths), width)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    pages = table[sequence, positions // _PAGE_TOKENS]
    slots = pages * np.int32(_PAGE_TOKENS) + positions % np.int32(_PAGE_TOKENS)
    batch = Batch(
        tokens=np.concatenate([np.asarray(ids, np.int32) for ids in sequences]),
        token_source=np.full(len(positions), -1, np.int32),
        positions=positions,
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context_len=lengths,
        page_tables=(table,) * groups,
        slots=(slots,) * groups,
        logit_rows=np.zeros(0, np.int32),
        sequence_slot=np.arange(len(lengths), dtype=np.int32),
        adapter_slot=np.zeros(len(lengths), np.int32),
    )
    return batch, 1 + table.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Matrix:
    """Matrices that are read when a linear needs them."""

    keys: tuple[str, ...]
    parts: tuple[int, ...]
    stacked: bool = False
    nbytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Computed:
    """Matrices that a family makes of others, made each time that they are used."""

    source: ModelSource
    compute: Callable[..., Sequence[Float32]]
    keys: tuple[str, ...]
    parts: tuple[int, ...] = ()
    nbytes: int = 0

    def handle(self) -> ReferenceHandle:
        values = self.compute(*(self.source.parameter(key).dequantize() for key in self.keys))
        return ReferenceHandle(np.concatenate(values), tuple(len(part) for part in values))


class _Place(KVPool):
    """Names a KV group to `_CalibrationOps`, which has the memory of one layer for it."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec

    def copy(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        raise NotImplementedError

    def read(self, pages: Sequence[int], into: npt.NDArray[np.uint8]) -> Pending:
        raise NotImplementedError

    def write(self, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> Pending:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class _Vectors:
    """The `Weights` of a model that is run: norms and biases are placed, matrices are named."""

    def __init__(self, source: ModelSource, device: ReferenceDevice) -> None:
        self._source = source
        self._device = device

    def matrix(self, *keys: str, parts: Sequence[int] | None = None) -> Handle:
        rows = [self._source.shapes[key][0] for key in keys]
        cut = zip(rows, parts or [1] * len(rows), strict=True)
        return _Matrix(keys=keys, parts=tuple(n // count for n, count in cut for _ in range(count)))

    def vectors(self, key: str) -> Sequence[Handle]:
        rows = self._source.parameter(key).dequantize()
        return [self._device.put([Dense(array=row)]) for row in rows]

    def vector(self, *keys: str, offset: float = 0.0) -> Handle:
        parts: list[Weight] = [
            Dense(array=self._source.parameter(key).dequantize() + np.float32(offset))
            for key in keys
        ]
        return self._device.put(parts)

    def stack(self, *keys: str, feeds: str | None = None) -> Handle:
        shapes = [self._source.shapes[key] for key in keys]
        rows = tuple(shape[-2] for shape in shapes)
        return _Matrix(keys=keys, parts=rows, stacked=len(shapes[0]) == 3)

    def expert_bias(self, *keys: str) -> Handle:
        values = [self._source.parameter(key).dequantize() for key in keys]
        return self._device.put([Dense(array=np.concatenate(values, axis=-1))])

    def computed(self, compute: Callable[..., Sequence[Float32]], *keys: str) -> Handle:
        return _Computed(source=self._source, compute=compute, keys=keys)

    def kv_scales(self, key: str, value: str, *, heads: int) -> Mapping[str, Any]:
        return {}


class _CalibrationOps(ReferenceOps):
    def __init__(self, linears: Linears, pools: Sequence[KVPool]) -> None:
        self._linears = linears
        self._pools = pools

    def embed(self, table: Handle, tokens: npt.NDArray[np.int32]) -> Float32:
        assert isinstance(table, _Matrix)
        used, place = np.unique(tokens, return_inverse=True)
        return self._linears.table(table.keys[0], used.astype(np.int64))[place]

    def linear(
        self,
        x: Float32,
        weight: Handle,
        *,
        bias: Handle | None = None,
        adapters: AdapterRef | None = None,
        batch: Batch | None = None,
    ) -> tuple[Float32, ...]:
        if isinstance(weight, _Computed):
            return super().linear(x, weight.handle(), bias=bias)
        assert isinstance(weight, _Matrix)
        if len(x) == 0:
            return tuple(np.zeros((0, rows), np.float32) for rows in weight.parts)
        matrices = np.concatenate(self._linears.visit(weight.keys, x))
        return super().linear(x, ReferenceHandle(matrices, weight.parts), bias=bias)

    def moe(
        self,
        x: Float32,
        router_logits: Float32,
        gate_up: Handle,
        down: Handle,
        *,
        routing: Routing,
        activation: str,
        gate_up_bias: Handle | None = None,
        down_bias: Handle | None = None,
    ) -> Float32:
        assert isinstance(gate_up, _Matrix)
        assert isinstance(down, _Matrix)
        self._linears.mixture(gate_up.keys, x)
        chosen, weights = route(router_logits, routing)
        output = np.zeros_like(x)
        for index in range(router_logits.shape[1]):
            expert = index if gate_up.stacked else None
            rows, choice = np.nonzero(chosen == index)
            inner = x[rows] @ np.concatenate(self._linears.visit(gate_up.keys, x[rows], expert)).T
            if gate_up_bias is not None:
                inner += weights_of(gate_up_bias)[index]
            gate, up = np.split(inner, [gate_up.parts[0]], axis=-1)
            inner = self.gated_act(gate, up, activation)
            (matrix,) = self._linears.visit(down.keys, inner, expert)
            result = inner @ matrix.T
            if down_bias is not None:
                result += weights_of(down_bias)[index]
            output[rows] += result * weights[rows, choice, None]
        return output

    def attention(
        self,
        q: Float32,
        k: Float32 | None,
        v: Float32 | None,
        *,
        batch: Batch,
        pool: KVPool,
        layer: int,
        **others: Any,
    ) -> Float32:
        # A layer's K and V are not looked at again once it has attended.
        memory = self._pools[pool.spec.group]
        return super().attention(q, k, v, batch=batch, pool=memory, layer=0, **others)
