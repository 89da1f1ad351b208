"""Many small random attentions of the CPU backend against float64.

    python ci/cpu_random_attention.py --steps 1000000

Every case draws heads, widths, page size, KV dtype, window, masks, norms and rotation, and runs
some sequences through several steps in chunks, at every instruction-set level that runs here.
Unused slots hold NaN. Ends with an error that names the case's seed at the first result out of
bounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from polysilicon.backend import KV_LARGEST_CODE, Batch, KVSpec, Rope, kv_planes
from polysilicon.testing import oracles
from polysilicon_cpu import levels
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.native.attention import Attention
from polysilicon_cpu.options import Options
from polysilicon_cpu.pools import CPUKVPool

Float64 = npt.NDArray[np.float64]

LAYER = 3
DTYPE_STEP = {"f32": 0.0, "f16": 2.0**-10, "bf16": 2.0**-7, "int8": 2.0**-5, "fp8_e4m3": 2.0**-3}
"""By KV dtype, how far apart neighbours are: vectors that are rotated, normed, turned or scaled may
be stored as either."""


class WrongResult(Exception):
    """An attention outside of its bound; the message names the case."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    key_heads: int
    group: int
    dim: int
    value_dim: int
    page_size: int
    dtype: str
    window: int | None
    softcap: float | None
    causal: bool
    exact: bool

    @property
    def heads(self) -> int:
        return self.key_heads * self.group


def random_shape(rng: np.random.Generator) -> Shape:
    dim = int(rng.choice([32, 64, 80, 96, 128, 256, 40, 33]))
    return Shape(
        key_heads=int(rng.choice([1, 2, 3])),
        group=int(rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 13, 16])),
        dim=dim,
        value_dim=dim if rng.random() < 0.7 else int(rng.choice([32, 64, 80, 20])),
        page_size=int(rng.choice([16, 16, 32, 64, 4, 8, 1])),
        dtype=str(rng.choice(list(DTYPE_STEP))),
        window=int(rng.choice([0, 0, 1, 5, 17, 100, 300])) or None,
        softcap=float(rng.choice([0, 0, 2.0, 30.0])) or None,
        causal=bool(rng.random() < 0.85),
        exact=bool(rng.random() < 0.5),
    )


class Case:
    """Some sequences in a pool, and what float64 makes of them."""

    def __init__(self, rng: np.random.Generator, device: CPUDevice, longest: int) -> None:
        self.rng = rng
        self.shape = shape = random_shape(rng)
        count = int(rng.integers(1, 7))
        self.lengths = [int(rng.integers(1, longest)) for _ in range(count)]
        needed = [length // shape.page_size + 1 for length in self.lengths]
        self.pages = sum(needed) + 1
        order = rng.permutation(np.arange(1, self.pages)).astype(np.int32)
        self.tables = np.split(order, np.cumsum(needed)[:-1])
        self.shares = count > 1 and bool(rng.random() < 0.4)
        if self.shares:
            for table in self.tables[1:]:
                most = min(len(table), len(self.tables[0])) - 1
                common = int(rng.integers(0, most + 1))
                table[:common] = self.tables[0][:common]
        spec = KVSpec(
            group=0,
            name="random",
            layers=(1, LAYER),
            window=shape.window,
            planes=kv_planes(
                heads=shape.key_heads,
                key_dim=shape.dim,
                value_dim=shape.value_dim,
                dtype=shape.dtype,
            ),
            page_size=shape.page_size,
        )
        self.pool = CPUKVPool(device, spec, self.pages)
        self._fill_with_nan(spec)
        self.rope = self._random_rope()
        normed = rng.random() < 0.3
        self.norm = (1 + rng.normal(0, 0.3, shape.dim)).astype(np.float32) if normed else None
        self.sinks = (
            rng.normal(0, 2, shape.heads).astype(np.float32) if rng.random() < 0.3 else None
        )
        norm = None if self.norm is None else (self.norm, 0.125)
        self.attention = Attention(
            device, self.pool, heads=shape.heads, scale=shape.dim**-0.5, rope=self.rope,
            q_norm=norm, k_norm=norm, softcap=shape.softcap, sinks=self.sinks,
            causal=shape.causal, exact=shape.exact,
        )  # fmt: skip
        slots = self.pages * shape.page_size
        self.keys = np.zeros((slots, shape.key_heads, shape.dim))
        self.values = np.zeros((slots, shape.key_heads, shape.value_dim))
        self.done = [0] * count

    def _random_rope(self) -> Rope | None:
        if self.rng.random() < 0.5:
            return None
        dim = int(self.rng.choice([self.shape.dim // 2 * 2, 16]))
        return Rope(
            dim=dim,
            frequencies=tuple(10000.0 ** (-np.arange(0, dim, 2) / dim)),
            scale=float(self.rng.choice([1.0, 1.25])),
            interleaved=bool(self.rng.random() < 0.5),
        )

    def _fill_with_nan(self, spec: KVSpec) -> None:
        header = np.frombuffer(spec.block_header(), np.uint8)
        blocks = spec.page_size // spec.block
        data = np.full((self.pages, blocks, spec.block_bytes), 0xFF, np.uint8)
        data[..., : header.size] = header
        self.pool.write(range(self.pages), data).result()

    def steps(self, most: int) -> int:
        """Run and check up to `most` steps; how many there were."""
        for step in range(most):
            chunks = [
                (int(s), min(self.lengths[s] - self.done[s], self._chunk(step)))
                for s in self.rng.permutation(len(self.lengths))
                if self.done[s] < self.lengths[s]
            ]
            if not chunks:
                return step
            # Whoever shares pages has to write the same into them: one after the other first.
            for part in [[chunk] for chunk in chunks] if self.shares and step == 0 else [chunks]:
                self._step(part)
        return most

    def _chunk(self, step: int) -> int:
        if self.shares and step == 0:
            return int(self.rng.choice([10_000, 300]))
        return int(self.rng.choice([1, 1, 2, 5, 11, 10_000, 260]))

    def _step(self, chunks: list[tuple[int, int]]) -> None:
        rng, shape = self.rng, self.shape
        tree = self._random_trees(chunks) if rng.random() < 0.3 else None
        batch = self._batch(chunks, tree, padding=int(rng.integers(0, 3)))
        tokens = len(batch.tokens)
        q = rng.normal(0, 1.5, (tokens, shape.heads * shape.dim)).astype(np.float32)
        k = rng.normal(0, 1, (tokens, shape.key_heads * shape.dim)).astype(np.float32)
        v = rng.normal(0, 1, (tokens, shape.key_heads * shape.value_dim)).astype(np.float32)
        actual = self.attention(q, k, v, batch, LAYER)
        expected = self._expected(q, k, v, batch)
        error = np.abs(actual - expected)
        if not (error <= self._bound()).all():
            raise WrongResult(f"off by {np.nanmax(error):.2e} in {self.shape} with {chunks}")
        for sequence, count in chunks:
            self.done[sequence] += count

    def _bound(self) -> float:
        shape = self.shape
        bound = 3e-5
        if shape.dtype in ("bf16", "int8", "fp8_e4m3") and not shape.exact:
            bound += 0.06  # queries and weights are rounded to bf16 where many rows meet
        if self.rope is not None or self.norm is not None or shape.dtype in KV_LARGEST_CODE:
            bound += 2 * DTYPE_STEP[shape.dtype]
        return bound

    def _random_trees(self, chunks: list[tuple[int, int]]) -> list[tuple[npt.NDArray[Any], Any]]:
        """For each chunk the mask and the depths of a tree; some tokens see nothing."""
        trees = []
        for _, count in chunks:
            mask, depths = np.eye(count, dtype=np.bool_), np.zeros(count, np.int32)
            for node in range(1, count):
                parent = int(self.rng.integers(0, node))
                mask[node] |= mask[parent]
                depths[node] = depths[parent] + 1
            if count > 2 and self.rng.random() < 0.3:
                mask[1] = False
            trees.append((mask, depths))
        return trees

    def _batch(
        self, chunks: list[tuple[int, int]], trees: list[tuple[Any, Any]] | None, padding: int
    ) -> Batch:
        size = self.shape.page_size
        counts = [count for _, count in chunks]
        total = sum(counts)
        table = np.zeros((len(chunks), max(map(len, self.tables))), np.int32)
        slots, positions = np.zeros((2, total + padding), np.int32)
        mask = None
        if trees is not None:
            mask = np.zeros((total + padding, max(counts) + padding), np.bool_)
        row = 0
        for index, (sequence, count) in enumerate(chunks):
            before = self.done[sequence]
            pages, used = self.tables[sequence], -(-(before + count) // size)
            table[index, :used] = pages[:used]
            if self.shape.window is not None and trees is None:
                # As the KV manager has it: pages behind the window are gone.
                table[index, : max(0, before - self.shape.window + 1) // size] = 0
            context = np.arange(before, before + count)
            rows = slice(row, row + count)
            slots[rows] = pages[context // size] * size + context % size
            positions[rows] = context
            if trees is not None and mask is not None:
                mask[rows, :count] = trees[index][0]
                positions[rows] = before + trees[index][1]
            row += count
        return Batch(
            tokens=np.zeros(total + padding, np.int32),
            token_source=np.full(total + padding, -1, np.int32),
            positions=positions,
            query_start=np.cumsum([0, *counts]).astype(np.int32),
            context_len=np.array([self.done[s] + n for s, n in chunks], np.int32),
            page_tables=(table,),
            slots=(slots,),
            logit_rows=np.zeros(0, np.int32),
            sequence_slot=np.zeros(len(chunks), np.int32),
            adapter_slot=np.zeros(len(chunks), np.int32),
            tree_mask=mask,
        )

    def _expected(self, q: Any, k: Any, v: Any, batch: Batch) -> Float64:
        shape = self.shape
        tokens = int(batch.query_start[-1])
        positions = batch.positions
        queries = self._prepared(q.reshape(len(q), shape.heads, shape.dim), positions)
        keys = self._prepared(k.reshape(len(k), shape.key_heads, shape.dim), positions)
        slots = batch.slots[0][:tokens]
        values = v.reshape(len(v), shape.key_heads, -1)[:tokens].astype(np.float64)
        self.keys[slots] = oracles.stored(keys[:tokens], shape.dtype)
        self.values[slots] = oracles.stored(values, shape.dtype)
        output = np.zeros((len(q), shape.heads * shape.value_dim))
        for index, context in enumerate(batch.context_len):
            begin, end = batch.query_start[index : index + 2]
            before = context - (end - begin)
            place = np.arange(context)
            size = shape.page_size
            held = batch.page_tables[0][index][place // size] * size + place % size
            visible = np.ones((end - begin, context), np.bool_)
            if batch.tree_mask is not None:
                visible[:, before:] = batch.tree_mask[begin:end, : end - begin]
            elif shape.causal:
                visible[:, before:] = np.tri(end - begin, dtype=np.bool_)
            if shape.window is not None:
                own = positions[begin:end]
                at = np.concatenate([place[:before], own])
                visible &= at > own[:, None] - shape.window
            output[begin:end] = oracles.attend(
                queries[begin:end], self.keys[held], self.values[held], visible,
                scale=shape.dim**-0.5, softcap=shape.softcap,
                sinks=None if self.sinks is None else self.sinks.astype(np.float64),
            )  # fmt: skip
        return output

    def _prepared(self, x: npt.NDArray[np.float32], positions: Any) -> Float64:
        wide = x.astype(np.float64)
        if self.norm is not None:
            wide = oracles.rms_norm(wide, self.norm.astype(np.float64), 0.125)
        return wide if self.rope is None else oracles.rotate(wide, positions, self.rope)


def run(count: int, seed: int, seconds: float, longest: tuple[int, ...] = (40, 40, 300)) -> int:
    """Steps checked, of `count` or as many as the time allowed. longest: contexts, of which each
    case takes one."""
    usable = [level for level in levels.built() if levels.failure(level) is None]
    devices = [
        (level, threads, CPUDevice(Options(level=level, threads=threads)))
        for level in usable
        for threads in (1, 2, 3)
    ]
    begin, done, number = time.monotonic(), 0, 0
    try:
        while done < count and time.monotonic() - begin < seconds:
            rng = np.random.default_rng([seed, number])
            level, threads, device = devices[number % len(devices)]
            try:
                case = Case(rng, device, int(rng.choice(longest)))
                done += case.steps(6)
                case.pool.close()
            except WrongResult as error:
                raise WrongResult(
                    f"seed [{seed}, {number}], {level} x {threads}: {error}"
                ) from None
            number += 1
    finally:
        for _, _, device in devices:
            device.close()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    arguments = parser.parse_args()
    done = run(arguments.steps, arguments.seed, arguments.seconds)
    print(f"{done:,} random attentions within their bounds (seed {arguments.seed})")


if __name__ == "__main__":
    main()
