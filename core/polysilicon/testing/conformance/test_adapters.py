"""LoRA adapters: each sequence's own, in one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import AdapterPool, AdapterRef, AdapterSpec, AdapterTarget, Batch, Ops
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import Float32, Float64, Kit, as_forward, assert_close

INPUTS, OUTPUTS = 48, (40, 16, 9)
Adapter = Mapping[str, Sequence[tuple[Float32, Float32] | None]]


@dataclasses.dataclass
class AdapterBench:
    """One linear with three parts, target `first`, and a pool with a second target of one part."""

    kit: Kit
    slots: int = 4
    max_rank: int = 8

    def __post_init__(self) -> None:
        kit = self.kit
        if not kit.capabilities.adapters:
            pytest.skip("declares no adapters")
        self.slots = min(self.slots, kit.capabilities.adapters)
        self.max_rank = min(self.max_rank, kit.capabilities.max_adapter_rank)
        self.x, self.x_values = kit.dense(kit.normal(130, INPUTS))
        matrices = [kit.dense(kit.normal(count, INPUTS)) for count in OUTPUTS]
        self.weight_values = [values for _, values in matrices]
        self.weights = [handle for handle, _ in matrices]
        self.bias, self.bias_values = kit.dense(kit.normal(OUTPUTS[1]))
        self.pool: AdapterPool = kit.device.adapter_pool(
            AdapterSpec(
                max_rank=self.max_rank,
                targets={
                    "first": AdapterTarget(inputs=INPUTS, outputs=OUTPUTS),
                    "second": AdapterTarget(inputs=INPUTS, outputs=OUTPUTS[1:2]),
                },
            ),
            self.slots,
        )

    def pair(self, outputs: int, rank: int | None = None) -> tuple[Float32, Float32]:
        rank = self.max_rank if rank is None else min(rank, self.max_rank)
        return self.kit.normal(rank, INPUTS), self.kit.normal(outputs, rank, scale=0.5)

    def adapter(self, rank: int | None = None) -> Adapter:
        return {
            "first": [self.pair(outputs, rank) for outputs in OUTPUTS],
            "second": [self.pair(OUTPUTS[1], rank)],
        }

    def through_lora(self, ops: Ops, batch: Batch) -> Any:
        """The first target's parts, adapted by `lora`."""
        x = ops.embed(self.x, batch.tokens)
        parts = tuple(ops.linear(x, weight)[0] for weight in self.weights)
        return ops.lora(x, parts, AdapterRef(pool=self.pool, target="first"), batch)

    def through_linear(self, ops: Ops, batch: Batch) -> Any:
        """The second target, adapted by `linear` itself, with a bias."""
        return ops.linear(
            ops.embed(self.x, batch.tokens),
            self.weights[1],
            bias=self.bias,
            adapters=AdapterRef(pool=self.pool, target="second"),
            batch=batch,
        )

    def check(self, chunks: Sequence[Chunk], adapters: Mapping[int, Adapter]) -> None:
        """Both targets against float64. adapters: what the slots hold."""
        batch = make_batch(chunks)
        actual = self.kit.evaluate(self.through_lora, batch, outputs=3)
        for part in range(3):
            expected = self.expected(chunks, adapters, "first", part)
            assert_close(actual[part], expected, 2 * self.kit.bound)
        [result] = self.kit.evaluate(self.through_linear, batch)
        expected = self.expected(chunks, adapters, "second", 0) + self.bias_values
        assert_close(result, expected, 2 * self.kit.bound)

    def expected(
        self, chunks: Sequence[Chunk], adapters: Mapping[int, Adapter], target: str, part: int
    ) -> Float64:
        weight = self.weight_values[1 if target == "second" else part]
        results = []
        for chunk in chunks:
            x = self.x_values[list(chunk.tokens)]
            result = x @ weight.T
            parts = adapters.get(chunk.adapter, {}).get(target, ())
            pair = parts[part] if parts else None
            if pair is not None:
                down, up = (matrix.astype(np.float64) for matrix in pair)
                result = result + x @ down.T @ up.T
            results.append(result)
        return np.concatenate(results)

    def chunk(self, count: int, adapter: int) -> Chunk:
        tokens = [int(token) for token in self.kit.rng.integers(0, 130, count)]
        return Chunk(tokens=tokens, adapter=adapter)


@pytest.fixture
def bench(kit: Kit) -> AdapterBench:
    return AdapterBench(kit)


def test_declared_consistently(kit: Kit) -> None:
    capabilities = kit.capabilities
    assert capabilities.adapters == 0 or capabilities.adapters >= 2, "slot 0 is none"
    assert (capabilities.adapters > 0) == (capabilities.max_adapter_rank > 0)


def test_empty_pool(bench: AdapterBench) -> None:
    bench.check([bench.chunk(5, 0), bench.chunk(1, 0)], {})


@pytest.mark.parametrize("count", [1, 7, 33, 130])
def test_one_adapter(bench: AdapterBench, count: int) -> None:
    adapter = bench.adapter()
    bench.pool.write(1, adapter)
    bench.check([bench.chunk(count, 1)], {1: adapter})


def test_mixed_batch(bench: AdapterBench) -> None:
    """Every slot, none, and one adapter on several sequences that are not neighbours."""
    adapters = {slot: bench.adapter() for slot in range(1, bench.slots)}
    for slot, adapter in adapters.items():
        bench.pool.write(slot, adapter)
    last = bench.slots - 1
    for counts in ((1, 1, 1, 1, 1, 1), (5, 1, 17, 2, 1, 8)):
        slots = (1, 0, last, last // 2, 0, 1)
        bench.check([bench.chunk(n, s) for n, s in zip(counts, slots, strict=True)], adapters)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_ranks(bench: AdapterBench, rank: int) -> None:
    """Ranks below the pool's largest."""
    adapter = bench.adapter(rank)
    bench.pool.write(1, adapter)
    bench.check([bench.chunk(4, 1), bench.chunk(3, 0)], {1: adapter})


def test_ranks_differ_between_slots_and_parts(bench: AdapterBench) -> None:
    uneven: Adapter = {
        "first": [
            bench.pair(outputs, rank) for outputs, rank in zip(OUTPUTS, (1, 8, 5), strict=True)
        ]
    }
    adapters = {1: uneven, bench.slots - 1: bench.adapter(2)}
    for slot, adapter in adapters.items():
        bench.pool.write(slot, adapter)
    bench.check([bench.chunk(4, slot) for slot in (bench.slots - 1, 1, 0)], adapters)


def test_missing_targets_and_parts(bench: AdapterBench) -> None:
    """They are left as they are, also where the slot's last adapter had them."""
    bench.pool.write(1, bench.adapter())
    partial: Adapter = {"first": [None, bench.pair(OUTPUTS[1]), None]}
    bench.pool.write(1, partial)
    bench.check([bench.chunk(4, 1), bench.chunk(2, 0)], {1: partial})
    other: Adapter = {"second": [bench.pair(OUTPUTS[1])]}
    bench.pool.write(1, other)
    bench.check([bench.chunk(4, 1), bench.chunk(2, 0)], {1: other})


def test_cleared_slots(bench: AdapterBench) -> None:
    adapters = {slot: bench.adapter() for slot in range(1, bench.slots)}
    for slot, adapter in adapters.items():
        bench.pool.write(slot, adapter)
    bench.pool.clear(1)
    del adapters[1]
    chunks = [bench.chunk(3, slot) for slot in (1, bench.slots - 1, 0)]
    bench.check(chunks, adapters)
    adapters[1] = bench.adapter(3)
    bench.pool.write(1, adapters[1])
    bench.check(chunks, adapters)


def test_writes_take_effect_for_later_steps(bench: AdapterBench) -> None:
    """A step submitted before a write, and read after it, used what the slot held."""
    first, second = bench.adapter(), bench.adapter()
    chunks = [bench.chunk(5, 1)]
    batch = make_batch(chunks)

    program = bench.kit.device.compile(as_forward(bench.through_linear))
    bench.pool.write(1, first)
    before = program(batch, None)
    bench.pool.write(1, second)
    after = program(batch, None)
    for pending, adapter in ((after, second), (before, first)):
        expected = bench.expected(chunks, {1: adapter}, "second", 0) + bench.bias_values
        assert_close(pending.result().logits, expected, 2 * bench.kit.bound)


def test_given_arrays_are_not_kept(bench: AdapterBench) -> None:
    adapter = bench.adapter()
    given: Adapter = {
        target: [None if pair is None else (pair[0].copy(), pair[1].copy()) for pair in parts]
        for target, parts in adapter.items()
    }
    bench.pool.write(1, given)
    for parts in given.values():
        for pair in parts:
            if pair is not None:
                pair[0][:], pair[1][:] = 0, 0
    bench.check([bench.chunk(3, 1)], {1: adapter})
