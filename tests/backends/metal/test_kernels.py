"""Our Metal kernels, compiled as C++, against float64."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip(
    "mlx.core", reason="mlx is not installed: pip install 'polysilicon[metal]'"
)

from polysilicon.backend import Rope, pack_codes  # noqa: E402
from polysilicon.testing.attention import AttentionBench, AttentionCase, Extension  # noqa: E402
from polysilicon.testing.conformance import test_kv_codes as kv_codes  # noqa: E402
from polysilicon.testing.kit import Kit  # noqa: E402
from polysilicon_metal import kernels, plan  # noqa: E402
from polysilicon_metal.plugin import MetalBackend  # noqa: E402


@pytest.fixture
def kit():
    device = MetalBackend().open(0, {})
    yield Kit(device, np.random.default_rng())
    device.close()


@pytest.fixture
def make_bench(emulation, kit):
    """Makes benches whose pools were filled without our kernels, which take their time here."""

    def make(case, pages=8):
        with emulation.paused():
            return AttentionBench(kit, case, pages=pages, vocabulary=60)

    return make


def prefill_and_decode(bench, prompt=19):
    context = bench.context(prompt + 2)
    for count in (prompt, 1, 1):
        bench.step([Extension(context=context, tokens=bench.random_tokens(count))])


@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "kv_dtype"),
    [
        (1, 1, 32, "f32"),
        (9, 3, 64, "bf16"),
        (7, 1, 80, "f16"),
        (4, 2, 64, "int8"),
        (4, 2, 48, "fp8_e4m3"),
    ],
)
def test_heads_and_dtypes(make_bench, emulation, heads, key_heads, dim, kv_dtype):
    case = AttentionCase(heads=heads, key_heads=key_heads, dim=dim, kv_dtype=kv_dtype)
    prefill_and_decode(make_bench(case))
    assert emulation.kernels["attention"].launches > 3


def test_every_code_of_fp8(emulation, kit):
    kv_codes.test_every_code_is_read_as_its_value(kit)
    assert emulation.kernels["attention"].launches


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(dim=32, value_dim=96, page_size=1),
        AttentionCase(dim=64, value_dim=32, window=5, sinks=True, scale=3.0, page_size=64),
        AttentionCase(dim=32, softcap=0.5, sinks=True, page_size=2),
        AttentionCase(dim=32, causal=False, window=7),
        AttentionCase(dim=256, heads=2, key_heads=2),
    ],
)
def test_scores_and_masks(make_bench, case):
    prefill_and_decode(make_bench(case, pages=2 + 24 // (case.page_size or 16)))


def test_all_at_once(make_bench):
    rope = Rope(dim=16, frequencies=tuple(100.0 ** (-np.arange(8) / 8)))
    case = AttentionCase(
        heads=6, key_heads=3, dim=32, window=9, softcap=8.0, sinks=True, q_norm=True, k_norm=True,
        rope=rope, kv_dtype="int8",
    )  # fmt: skip
    prefill_and_decode(make_bench(case), prompt=23)


def test_blocks_of_queries(make_bench, monkeypatch):
    """Chunks longer than a block beside decodes, and a sequence without tokens."""
    monkeypatch.setattr(plan, "MAX_QUERIES", 4)
    bench = make_bench(AttentionCase(heads=2, key_heads=1, dim=32), pages=9)
    contexts = [bench.context(20) for _ in range(4)]
    for counts in ((9, 1, 2, 5), (1, 8, 0, 1), (3, 1, 1, 1)):
        bench.step([Extension(context=context, tokens=bench.random_tokens(count))
                    for context, count in zip(contexts, counts, strict=True)])  # fmt: skip


def test_parts_of_a_long_context(make_bench, monkeypatch):
    """Those behind the window, and those past the shorter context, are empty."""
    monkeypatch.setattr(kernels, "_PART", 4)
    bench = make_bench(AttentionCase(heads=4, key_heads=2, dim=32, window=14, sinks=True))
    contexts = [bench.context(40), bench.context(20)]
    for counts in ((29, 3), (1, 1), (1, 1)):
        bench.step([Extension(context=context, tokens=bench.random_tokens(count))
                    for context, count in zip(contexts, counts, strict=True)])  # fmt: skip


def test_trees(make_bench):
    bench = make_bench(AttentionCase(dim=32, window=3))
    contexts = [bench.context(30), bench.context(30)]
    bench.step([Extension(context=c, tokens=bench.random_tokens(9)) for c in contexts])
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]], np.bool_)
    before = len(contexts[0].tokens)
    tree = Extension(
        context=contexts[0], tokens=bench.random_tokens(4), tree=mask,
        positions=[before, before + 1, before + 1, before + 1],
    )  # fmt: skip
    bench.step([tree, Extension(context=contexts[1], tokens=bench.random_tokens(1))])


@pytest.mark.parametrize(
    ("bits", "tokens"), [(2, 1), (3, 8), (4, 2), (5, 1), (6, 1), (6, 3), (8, 4)]
)
@pytest.mark.parametrize(("outputs", "runs"), [(1, 1), (7, 2), (9, 37)])
def test_product_of_16(emulation, outputs, runs, bits, tokens):
    rng = np.random.default_rng()
    codes = rng.integers(0, 1 << bits, (outputs, 32 * runs), np.uint8)
    scales, biases = rng.normal(size=(2, 2, outputs, runs)).astype(np.float32)
    x = rng.normal(size=(tokens, 32 * runs)).astype(np.float32)
    y = kernels.product_of_16(
        mx.array(x),
        mx.array(pack_codes(codes, bits).view("<u4")),
        [mx.array(scale) for scale in scales],
        [mx.array(bias) for bias in biases],
        bits=bits,
    )
    own_scale, own_bias = (
        np.repeat(np.stack(list(pair), -1).reshape(outputs, -1), 16, axis=1).astype(np.float64)
        for pair in (scales, biases)
    )
    expected = x.astype(np.float64) @ (own_scale * codes + own_bias).T
    np.testing.assert_allclose(np.array(y), expected, atol=1e-5 * np.abs(expected).max())


BROKEN = {
    "reads outside": ("y[0] = x[4];", r"x\[4\] of 4"),
    "writes outside": ("y[2] = 1.0f;", r"y\[2\] of 2"),
    "parts at a barrier": (
        "if (thread_position_in_grid.x == 0)"
        " { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }",
        "threads wait for others",
    ),
    "parts in a sum": (
        "if (thread_position_in_grid.x > 3) { return; } y[0] = metal::simd_sum(1.0f);",
        "threads wait for others",
    ),
    "is no C++": ("y[0] = undeclared;", "undeclared"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_the_harness_can_fail(make_kernel, kind):
    source, message = BROKEN[kind]
    kernel = make_kernel(name="broken", input_names=["x"], output_names=["y"], source=source)
    with pytest.raises(Exception, match=message):
        kernel(inputs=[mx.zeros(4)], template=[("N", 1)], grid=(8, 1, 1), threadgroup=(8, 1, 1),
               output_shapes=[(2,)], output_dtypes=[mx.float32])  # fmt: skip
