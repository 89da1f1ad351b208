"""Attention through page tables: where keys and values go, and where they are read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import Batch, Ops
from polysilicon.testing.attention import AttentionBench, AttentionCase, Context, Extension
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.kit import Kit, as_forward, assert_close


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def each_page_size_and_dtype(kit: Kit) -> list[tuple[int, str]]:
    capabilities = kit.capabilities
    return [(size, dtype) for size in capabilities.page_sizes for dtype in capabilities.kv_dtypes]


def test_every_page_size_and_kv_dtype(kit: Kit) -> None:
    """Two sequences over page borders, then a mixed step, in every declared combination."""
    for page_size, kv_dtype in each_page_size_and_dtype(kit):
        long = page_size + 3
        bench = AttentionBench(
            kit,
            AttentionCase(page_size=page_size, kv_dtype=kv_dtype, dim=32),
            pages=2 * pages_for(long + 8, page_size) + 2,
        )
        first, second = bench.context(long + 8), bench.context(long + 8)
        bench.step([Extension(context=first, tokens=bench.random_tokens(long))])
        bench.step([Extension(context=first, tokens=bench.random_tokens(1)),
                    Extension(context=second, tokens=bench.random_tokens(5))])  # fmt: skip
        bench.step([Extension(context=second, tokens=bench.random_tokens(1)),
                    Extension(context=first, tokens=bench.random_tokens(1))])  # fmt: skip
        bench.pool.close()


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_contexts_at_page_borders(kit: Kit, offset: int, pages: int) -> None:
    """A decode whose context ends just before, at and just after the end of a page."""
    bench = AttentionBench(kit, AttentionCase())
    length = pages * bench.page_size + offset
    context = bench.context(length + 3)
    bench.step([Extension(context=context, tokens=bench.random_tokens(length))])
    for _ in range(3):
        bench.step([Extension(context=context, tokens=bench.random_tokens(1))])


def test_context_of_one_token(kit: Kit) -> None:
    bench = AttentionBench(kit, AttentionCase())
    for _ in range(3):
        bench.step([Extension(context=bench.context(1), tokens=bench.random_tokens(1))])


@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 100])
def test_chunked_prefill(kit: Kit, chunk: int) -> None:
    bench = AttentionBench(kit, AttentionCase())
    context = bench.context(100)
    tokens = bench.random_tokens(75)
    for start in range(0, len(tokens), chunk):
        bench.step([Extension(context=context, tokens=tokens[start : start + chunk])])


@pytest.mark.parametrize("sequences", [2, 9, 33])
def test_mixed_batch(kit: Kit, sequences: int) -> None:
    """Prefills, continued prefills and decodes in one step, in random order, several times."""
    per_sequence = pages_for(45, kit.capabilities.page_sizes[0])
    bench = AttentionBench(
        kit, AttentionCase(heads=2, key_heads=1, dim=32), pages=sequences * per_sequence + 1
    )
    contexts = [bench.context(45) for _ in range(sequences)]
    for _ in range(4):
        order = kit.rng.permutation(sequences)
        counts = kit.rng.choice([1, 1, 1, 2, 5, 11], sequences)
        bench.step([Extension(context=contexts[i], tokens=bench.random_tokens(int(count)))
                    for i, count in zip(order, counts, strict=True)])  # fmt: skip


def test_decode_batch(kit: Kit) -> None:
    """Many decodes at once with contexts of very different lengths."""
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 90, 127]
    size = kit.capabilities.page_sizes[0]
    bench = AttentionBench(
        kit,
        AttentionCase(heads=2, key_heads=1, dim=32),
        pages=sum(pages_for(length + 2, size) for length in lengths) + 1,
    )
    contexts = [bench.context(length + 2) for length in lengths]
    bench.step([Extension(context=c, tokens=bench.random_tokens(n))
                for c, n in zip(contexts, lengths, strict=True)])  # fmt: skip
    for _ in range(2):
        bench.step([Extension(context=c, tokens=bench.random_tokens(1)) for c in contexts])


@pytest.mark.parametrize("window", [None, 512])
def test_long_context(kit: Kit, window: int | None) -> None:
    """Beyond what one block of any kernel holds."""
    size = kit.capabilities.page_sizes[0]
    bench = AttentionBench(
        kit,
        AttentionCase(heads=2, key_heads=1, dim=32, window=window),
        pages=pages_for(1300, size) + 1,
    )
    context = bench.context(1300)
    for count in (1100, 1, 1, 130, 1):
        bench.step([Extension(context=context, tokens=bench.random_tokens(count))])


def test_shared_prefix(kit: Kit) -> None:
    """Sequences whose tables name the same pages, as after prefix hits, each with its own tail."""
    bench = AttentionBench(kit, AttentionCase())
    prefix = bench.context(2 * bench.page_size)
    bench.step([Extension(context=prefix, tokens=bench.random_tokens(2 * bench.page_size))])
    branches = [
        Context(
            pages=prefix.pages + bench.context(8).pages,
            tokens=list(prefix.tokens),
            positions=list(prefix.positions),
        )
        for _ in range(3)
    ]
    for count in (3, 1):
        bench.step([Extension(context=b, tokens=bench.random_tokens(count)) for b in branches])


def test_reused_pages(kit: Kit) -> None:
    """What a page's last owner left there is gone when the next one wrote it."""
    bench = AttentionBench(kit, AttentionCase())
    length = 2 * bench.page_size + 5
    pages = bench.context(length + 2).pages
    for _ in range(3):
        context = Context(pages=[int(page) for page in kit.rng.permutation(pages)])
        bench.step([Extension(context=context, tokens=bench.random_tokens(length))])
        bench.step([Extension(context=context, tokens=bench.random_tokens(1))])


def test_rewritten_slots(kit: Kit) -> None:
    """Drafted tokens that were not accepted are overwritten in place."""
    bench = AttentionBench(kit, AttentionCase())
    context = bench.context(60)
    bench.step([Extension(context=context, tokens=bench.random_tokens(30))])
    for accepted in (1, 4, 2):
        known = len(context.tokens)
        bench.step([Extension(context=context, tokens=bench.random_tokens(5))])
        del context.tokens[known + accepted :]
        del context.positions[known + accepted :]
    bench.step([Extension(context=context, tokens=bench.random_tokens(1))])


def test_shared_kv(kit: Kit) -> None:
    """A layer without keys and values of its own attends to what an earlier one wrote."""
    bench = AttentionBench(kit, AttentionCase())

    def computation(ops: Ops, batch: Batch) -> Any:
        own = bench.forward(ops, batch)
        shared = bench.forward(ops, batch, store=False)
        return own, shared

    context = bench.context(40)
    for count in (21, 1, 6):
        extension = Extension(context=context, tokens=bench.random_tokens(count))
        results = kit.evaluate(computation, bench.batch([extension]), outputs=2)
        expected = bench.extend(extension)
        for result in results:
            assert_close(result, expected, bench.bound)


def test_layers_are_apart(kit: Kit) -> None:
    """A layer sees nothing of what another one stores in the same slots."""
    bench = AttentionBench(kit, AttentionCase())
    first, second = bench.spec.layers
    context, tokens, others = bench.context(20), bench.random_tokens(20), bench.random_tokens(20)
    programs = {
        layer: kit.device.compile(as_forward(functools.partial(bench.forward, layer=layer)))
        for layer in bench.spec.layers
    }
    other = Context(pages=context.pages)
    programs[first](bench.batch([Extension(context=context, tokens=tokens)]), None)
    programs[second](bench.batch([Extension(context=other, tokens=others)]), None)
    bench.extend(Extension(context=context, tokens=tokens))
    last = Extension(context=context, tokens=bench.random_tokens(1))
    actual = programs[first](bench.batch([last]), None).result().logits
    assert_close(actual, bench.extend(last), bench.bound)


def test_two_groups(kit: Kit) -> None:
    """A full and a sliding group in one forward, each through its own pages and slots."""
    size = kit.capabilities.page_sizes[0]
    full = AttentionBench(kit, AttentionCase())
    sliding = AttentionBench(kit, AttentionCase(window=9), group=1)
    full_context, sliding_context = full.context(3 * size), sliding.context(3 * size)

    def computation(ops: Ops, batch: Batch) -> Any:
        return full.forward(ops, batch), sliding.forward(ops, batch)

    for count in (size + 5, 1, 7, 1):
        tokens = full.random_tokens(count)
        chunk = Chunk(
            tokens=tokens,
            start=len(full_context.tokens),
            pages=(full_context.pages, sliding_context.pages),
        )
        actual = kit.evaluate(computation, make_batch([chunk], (size, size)), outputs=2)
        for bench, context, result in zip(
            (full, sliding), (full_context, sliding_context), actual, strict=True
        ):
            expected = bench.extend(Extension(context=context, tokens=tokens))
            assert_close(result, expected, bench.bound)


def test_page_table_wider_than_the_context(kit: Kit) -> None:
    """Columns past a sequence's context are 0."""
    bench = AttentionBench(kit, AttentionCase())
    context = bench.context(5 * bench.page_size)
    extension = Extension(context=context, tokens=bench.random_tokens(bench.page_size + 2))
    batch = bench.batch([extension])
    table = np.zeros((1, 5), np.int32)
    table[0, :2] = context.pages[:2]
    batch = dataclasses.replace(batch, page_tables=(table,))
    [actual] = kit.evaluate(bench.forward, batch)
    assert_close(actual, bench.extend(extension), bench.bound)
