"""Attention: head layouts, masks and everything it does beside the plain product."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import KVScales, Rope
from polysilicon.testing.attention import (
    AttentionBench,
    AttentionCase,
    Extension,
    skip_without_kv_scales,
    skip_without_tree_attention,
)
from polysilicon.testing.kit import Kit, assert_close


def rope_of(dim: int, *, scale: float = 1.0, interleaved: bool = False) -> Rope:
    return Rope(
        dim=dim,
        frequencies=tuple(10000.0 ** (-np.arange(0, dim, 2) / dim)),
        scale=scale,
        interleaved=interleaved,
    )


def prefill_and_decode(bench: AttentionBench, prompt: int, decodes: int = 3) -> None:
    context = bench.context(prompt + decodes)
    bench.step([Extension(context=context, tokens=bench.random_tokens(prompt))])
    for _ in range(decodes):
        bench.step([Extension(context=context, tokens=bench.random_tokens(1))])


@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 4), (8, 2), (6, 1), (9, 3), (7, 1)])
def test_heads(kit: Kit, heads: int, key_heads: int, dim: int) -> None:
    """Multi-head, grouped and multi-query attention."""
    bench = AttentionBench(kit, AttentionCase(heads=heads, key_heads=key_heads, dim=dim))
    prefill_and_decode(bench, 21)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 32), (32, 64), (192, 128)])
def test_values_of_another_width(kit: Kit, dim: int, value_dim: int) -> None:
    prefill_and_decode(AttentionBench(kit, AttentionCase(dim=dim, value_dim=value_dim)), 21)


@pytest.mark.parametrize("scale", [0.01, 0.125, 0.5])
def test_scale(kit: Kit, scale: float) -> None:
    prefill_and_decode(AttentionBench(kit, AttentionCase(scale=scale)), 21)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(kit: Kit, softcap: float) -> None:
    prefill_and_decode(AttentionBench(kit, AttentionCase(softcap=softcap)), 21)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sinks(kit: Kit, softcap: float | None, window: int | None) -> None:
    case = AttentionCase(sinks=True, softcap=softcap, window=window)
    prefill_and_decode(AttentionBench(kit, case), 21)


@pytest.mark.parametrize("window", range(-1, 2))
@pytest.mark.parametrize("pages", [1, 2])
def test_window_at_page_borders(kit: Kit, pages: int, window: int) -> None:
    """Windows of whole pages, one token fewer and one more, in a chunk and token by token."""
    size = kit.capabilities.page_sizes[0]
    bench = AttentionBench(kit, AttentionCase(window=max(1, pages * size + window)))
    prefill_and_decode(bench, (pages + 1) * size, size + 2 if size <= 64 else 3)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 40, 1000])
def test_window(kit: Kit, window: int) -> None:
    """What a query sees ends `window` tokens back, its own included, in one chunk and in many."""
    bench = AttentionBench(kit, AttentionCase(window=window))
    contexts = [bench.context(60) for _ in range(2)]
    bench.step([Extension(context=contexts[0], tokens=bench.random_tokens(53))])
    for count in (5, 1, 1, 17, 2, 20, 7):
        bench.step([Extension(context=contexts[1], tokens=bench.random_tokens(count))])
    bench.step([Extension(context=context, tokens=bench.random_tokens(1)) for context in contexts])


def test_pages_behind_the_window_are_not_read(kit: Kit) -> None:
    """They are 0 in the page table; page 0 holds garbage."""
    size = kit.capabilities.page_sizes[0]
    bench = AttentionBench(kit, AttentionCase(window=size))
    context = bench.context(4 * size)
    bench.step([Extension(context=context, tokens=bench.random_tokens(3 * size))])
    for _ in range(3):
        # The query stands at 3 * size or just after: it sees from 2 * size + 1 on.
        bench.step([Extension(context=context, tokens=bench.random_tokens(1), behind=2)])
    bench.step([Extension(context=context, tokens=bench.random_tokens(5), behind=2)])


@pytest.mark.parametrize("window", [None, 6])
def test_bidirectional(kit: Kit, window: int | None) -> None:
    """Without causality the step's tokens see each other, and the context before as ever."""
    bench = AttentionBench(kit, AttentionCase(causal=False, window=window))
    contexts = [bench.context(40), bench.context(40)]
    for _ in range(2):
        bench.step([Extension(context=c, tokens=bench.random_tokens(13)) for c in contexts])


@pytest.mark.parametrize("prompt", [1, 21, 70])
def test_calibrated_scales(kit: Kit, prompt: int) -> None:
    """Of fp8 KV, by head: some cut off what is large, others are generous. KV of another dtype is
    what it is without them; and what is stored with them is read without being told of them."""
    skip_without_kv_scales(kit)
    scales = KVScales(k=(1.3 / 448, 0.17), v=(0.5 / 448, 2.0**-8))
    for kv_dtype in kit.capabilities.kv_dtypes:
        case = AttentionCase(kv_dtype=kv_dtype, kv_scales=scales, rope=rope_of(64), window=40)
        bench = AttentionBench(kit, case)
        context = bench.context(prompt + 4)
        bench.step([Extension(context=context, tokens=bench.random_tokens(prompt))])
        for _ in range(2):
            bench.step([Extension(context=context, tokens=bench.random_tokens(1))])
        extension = Extension(context=context, tokens=bench.random_tokens(2))
        batch, untold = bench.batch([extension]), copy.copy(bench)
        untold.case = dataclasses.replace(case, kv_scales=None)
        for forward in (bench.forward, functools.partial(untold.forward, store=False)):
            [actual] = kit.evaluate(forward, batch)
        assert_close(actual, bench.extend(extension), bench.bound)
        bench.pool.close()


@pytest.mark.parametrize("part", ["k", "v"])
def test_calibrated_scales_of_other_heads(kit: Kit, part: str) -> None:
    skip_without_kv_scales(kit)
    if "fp8_e4m3" not in kit.capabilities.kv_dtypes:
        pytest.skip("declares no fp8_e4m3 KV")
    scales = KVScales(**{"k": (1.0, 1.0), "v": (1.0, 1.0), part: (1.0,)})
    case = AttentionCase(kv_dtype="fp8_e4m3", kv_scales=scales)
    with pytest.raises(ValueError, match=r"\w"):
        prefill_and_decode(AttentionBench(kit, case), 3)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dim", [64, 16])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rope(kit: Kit, scale: float, dim: int, interleaved: bool) -> None:
    rope = rope_of(dim, scale=scale, interleaved=interleaved)
    prefill_and_decode(AttentionBench(kit, AttentionCase(rope=rope)), 37)


@pytest.mark.parametrize(("q_norm", "k_norm"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rotated", [False, True])
def test_norms(kit: Kit, rotated: bool, q_norm: bool, k_norm: bool) -> None:
    """Norms come before the rotation."""
    rope = rope_of(64) if rotated else None
    case = AttentionCase(q_norm=q_norm, k_norm=k_norm, rope=rope)
    prefill_and_decode(AttentionBench(kit, case), 21)


def test_all_at_once(kit: Kit) -> None:
    case = AttentionCase(
        heads=6, key_heads=3, dim=32, window=19, softcap=8.0, sinks=True, q_norm=True, k_norm=True,
        rope=rope_of(16, scale=1.1),
    )  # fmt: skip
    prefill_and_decode(AttentionBench(kit, case), 45)


def test_large_scores(kit: Kit) -> None:
    """Scores whose exponentials overflow, and exact in every dtype."""
    bench = AttentionBench(kit, AttentionCase(scale=1.0))
    bench.q, bench.q_values = kit.dense(kit.rng.integers(-4, 5, bench.q_values.shape))
    bench.k, bench.k_values = kit.dense(kit.rng.integers(-4, 5, bench.k_values.shape))
    # The bench's own program was compiled with the queries and keys of before.
    prefill_and_decode(bench.another_pool(), 30)


def random_tree(kit: Kit, count: int) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """Depths and ancestor mask of a random tree whose parents come before their children."""
    mask = np.eye(count, dtype=np.bool_)
    depths = [0] * count
    for node in range(1, count):
        parent = int(kit.rng.integers(0, node))
        mask[node] |= mask[parent]
        depths[node] = depths[parent] + 1
    return depths, mask


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("rotated", [False, True])
def test_trees(kit: Kit, rotated: bool, window: int | None) -> None:
    """Drafted trees beside a decode and a causal chunk, with positions by depth."""
    skip_without_tree_attention(kit)
    bench = AttentionBench(kit, AttentionCase(rope=rope_of(64) if rotated else None, window=window))
    contexts = [bench.context(40) for _ in range(4)]
    bench.step([Extension(context=c, tokens=bench.random_tokens(9 + i))
                for i, c in enumerate(contexts)])  # fmt: skip
    extensions = []
    for context, count in zip(contexts, (12, 1, 5, 7), strict=True):
        depths, mask = random_tree(kit, count)
        positions = [len(context.tokens) + depth for depth in depths]
        if count == 5:
            extensions.append(Extension(context=context, tokens=bench.random_tokens(count)))
        else:
            extensions.append(
                Extension(
                    context=context,
                    tokens=bench.random_tokens(count),
                    positions=positions,
                    tree=mask,
                )
            )
    bench.step(extensions)


def test_token_that_sees_nothing_gets_zeros(kit: Kit) -> None:
    skip_without_tree_attention(kit)
    bench = AttentionBench(kit, AttentionCase())
    mask = np.tri(4, dtype=np.bool_)
    mask[2] = False
    bench.step([Extension(context=bench.context(4), tokens=bench.random_tokens(4), tree=mask)])
