"""Paged attention in Triton's interpreter against the reference device."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polysilicon.backend import (
    KV_LARGEST_CODE,
    Batch,
    Dense,
    KVScales,
    KVSpec,
    Normalization,
    Rope,
    kv_planes,
)
from polysilicon.reference.device import ReferenceDevice
from polysilicon_torch.angles import turns_of
from polysilicon_torch.batches import DeviceBatch
from polysilicon_torch.kernels import AttentionSettings, DeviceRope, HeadNorm
from polysilicon_torch.planes import KVPlanes
from polysilicon_torch.target import INTERPRETER
from polysilicon_torch.triton import attention as launchers
from polysilicon_torch.triton import attention_plan
from polysilicon_torch.tuning import Tuning

TORCH_KV = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
COMPUTE_BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
FLIP_BOUNDS = {"f32": 0.0, "f16": 1e-3, "bf16": 8e-3, "int8": 2e-2, "fp8_e4m3": 5e-2}
"""What keys and values that round to the other neighbour may add."""


@dataclasses.dataclass(kw_only=True)
class Case:
    """Shapes of one attention, and what it is asked for. units: compute units of the target, of
    which depends in how many parts contexts are split."""

    heads: int = 4
    key_heads: int = 2
    key_dim: int = 32
    value_dim: int | None = None
    page_size: int = 16
    kv: str = "f32"
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    norms: bool = False
    rope: Rope | None = None
    causal: bool = True
    kv_scales: KVScales | None = None
    shared: bool = False
    units: int = 1
    fp8: str = "none"
    layers: int = 2


def rope_of(dim, *, interleaved=False, scale=1.0, base=100.0):
    return Rope(
        dim=dim,
        frequencies=tuple(base ** (-np.arange(dim // 2) / (dim // 2))),
        interleaved=interleaved,
        scale=scale,
    )


SCALES = KVScales(k=(0.9 / 448, 0.02), v=(0.7 / 448, 2.0**-10))
"""Of two heads: codes of the first saturate, those of the second do not."""


class Bench:
    """A pool of the reference and one of torch, full of NaN, and sequences that grow in both."""

    def __init__(self, case, *, pages=40, seed=None):
        self.case = case
        self.rng = np.random.default_rng(seed)
        self.value_dim = case.value_dim or case.key_dim
        self.spec = KVSpec(
            group=0,
            name="full",
            layers=tuple(range(3, 3 + case.layers)),
            window=case.window,
            planes=kv_planes(
                heads=case.key_heads, key_dim=case.key_dim, value_dim=self.value_dim, dtype=case.kv
            ),
            page_size=case.page_size,
        )
        self.reference = ReferenceDevice()
        self.pool = self.reference.kv_pool(self.spec, pages)
        for layer in self.spec.layers:
            for name in ("k", "v"):
                self.pool.plane(name, layer)[:] = 100 if case.kv == "int8" else np.nan
        shape = (case.layers, pages, case.key_heads, case.page_size)
        quantised = case.kv in KV_LARGEST_CODE
        k, v = (
            torch.empty((*shape, dim), dtype=TORCH_KV[case.kv])
            for dim in (case.key_dim, self.value_dim)
        )
        for plane in (k, v):
            plane.view(torch.uint8).fill_(0x64 if case.kv == "int8" else 0x7F)
            if not quantised:
                plane.fill_(torch.nan)
        self.planes = KVPlanes(
            k=k,
            v=v,
            k_scale=torch.full(shape, torch.nan) if quantised else None,
            v_scale=torch.full(shape, torch.nan) if quantised else None,
            dtype=case.kv,
            group=0,
            window=case.window,
            page_size=case.page_size,
        )
        self.free = [int(page) for page in 1 + self.rng.permutation(pages - 1)]
        self.scale = case.key_dim**-0.5
        self.q_norm, self.k_norm = self.rng.uniform(0.5, 1.5, (2, case.key_dim)).astype(np.float32)
        self.sinks = self.rng.normal(size=case.heads).astype(np.float32)
        target = dataclasses.replace(INTERPRETER, compute_units=case.units, fp8=case.fp8)
        self.tuning = Tuning.of(target)

    def sequence(self, capacity):
        pages = [self.free.pop() for _ in range(-(-capacity // self.case.page_size))]
        return SimpleNamespace(pages=pages, length=0)

    def rounded(self, *shape):
        x = self.rng.standard_normal(shape, np.float32)
        return torch.from_numpy(x).to(self.case.dtype)

    def batch(self, steps, positions=None, tree=None, behind=0):
        """The next tokens of sequences: [(sequence, count)]."""
        size = self.case.page_size
        starts = np.cumsum([0, *(count for _, count in steps)]).astype(np.int32)
        index = [np.arange(s.length, s.length + count) for s, count in steps]
        width = max((len(s.pages) for s, _ in steps), default=1)
        table = np.zeros((len(steps), width), np.int32)
        slots = []
        for row, (sequence, _) in enumerate(steps):
            table[row, : len(sequence.pages)] = sequence.pages
            slots.append(table[row, index[row] // size] * size + index[row] % size)
            table[row, :behind] = 0
        flat = np.concatenate([*index, np.zeros(0, np.int64)]).astype(np.int32)
        tokens = len(flat)
        for sequence, count in steps:
            sequence.length += count
        return Batch(
            tokens=np.zeros(tokens, np.int32),
            token_source=np.full(tokens, -1, np.int32),
            positions=flat if positions is None else np.asarray(positions, np.int32),
            query_start=starts,
            context_len=np.array([s.length for s, _ in steps], np.int32),
            page_tables=(table,),
            slots=(np.concatenate([*slots, np.zeros(0)]).astype(np.int32),),
            logit_rows=np.zeros(0, np.int32),
            sequence_slot=np.zeros(len(steps), np.int32),
            adapter_slot=np.zeros(len(steps), np.int32),
            tree_mask=tree,
        )

    def on_device(self, batch, tokens, sequences, max_query):
        """The batch padded to so many tokens and sequences."""

        def padded(array, *shape, value=0):
            result = np.full(shape, value, array.dtype)
            result[tuple(slice(0, n) for n in array.shape)] = array
            return torch.from_numpy(result)

        real = len(batch.tokens)
        counts = np.diff(batch.query_start)
        owner = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        tree = batch.tree_mask
        table = batch.page_tables[0]
        return DeviceBatch(
            tokens=padded(batch.tokens, tokens),
            token_source=padded(batch.token_source, tokens),
            positions=padded(batch.positions, tokens),
            query_start=padded(batch.query_start, sequences + 1, value=real),
            context_len=padded(batch.context_len, sequences),
            page_tables=(padded(table, sequences, table.shape[1] + 1),),
            slots=(padded(batch.slots[0], tokens),),
            logit_rows=torch.zeros(1, dtype=torch.int32),
            sequence_slot=padded(batch.sequence_slot, sequences),
            adapter_slot=padded(batch.adapter_slot, sequences),
            token_sequence=padded(owner, tokens, value=-1),
            tree_mask=None if tree is None else padded(tree, tokens, tree.shape[1]),
            tokens_padded=tokens,
            sequences_padded=sequences,
            max_query=max_query or int(counts.max(initial=1)),
            max_context=int(batch.context_len.max(initial=1)) + 7,
        )

    def step(self, steps, *, pad=(0, 0), max_query=None, layer=1, **kwargs):
        """Attend in both; holds outputs and pools to one another. Gives the outputs."""
        case = self.case
        batch = self.batch(steps, **kwargs)
        real = len(batch.tokens)
        tokens = real + pad[0]
        on_device = self.on_device(batch, tokens, len(steps) + pad[1], max_query)
        # q, k and v as views of one fused product, with rows of padding that are not finite.
        widths = [case.heads * case.key_dim, case.key_heads * case.key_dim,
                  case.key_heads * self.value_dim]  # fmt: skip
        fused = torch.full((tokens, sum(widths) + 3), torch.nan, dtype=case.dtype)
        fused[:real] = self.rounded(real, sum(widths) + 3)
        q, k, v = torch.split(fused[:, 3:], widths, 1)
        if case.shared:
            k = v = None
        actual = launchers.attention(
            q, k, v, on_device, self.planes, layer, self.settings(),
            dtype=case.dtype, tuning=self.tuning,
        )  # fmt: skip
        expected = self.expected(
            *(None if x is None else x[:real] for x in (q, k, v)), batch, layer
        )
        assert actual.dtype == case.dtype
        assert actual.is_contiguous()
        assert not actual[real:].any()
        self.hold(actual[:real].float().numpy(), expected)
        return actual[:real]

    def settings(self):
        case = self.case
        rope = case.rope
        return AttentionSettings(
            heads=case.heads,
            scale=self.scale,
            rope=rope
            and DeviceRope(
                dim=rope.dim,
                frequencies=torch.tensor(rope.frequencies),
                turns=turns_of(rope.frequencies),
                scale=rope.scale,
                interleaved=rope.interleaved,
            ),
            q_norm=HeadNorm(weight=torch.from_numpy(self.q_norm), eps=1e-5) if case.norms else None,
            k_norm=HeadNorm(weight=torch.from_numpy(self.k_norm), eps=1e-6) if case.norms else None,
            softcap=case.softcap,
            sinks=torch.from_numpy(self.sinks) if case.sinks else None,
            causal=case.causal,
            key_scales=case.kv_scales and torch.tensor(case.kv_scales.k),
            value_scales=case.kv_scales and torch.tensor(case.kv_scales.v),
        )

    def expected(self, q, k, v, batch, layer):
        case = self.case

        def norm(weight, eps):
            handle = self.reference.put([Dense(array=weight)])
            return Normalization(weight=handle, eps=eps) if case.norms else None

        return self.reference.ops.attention(
            *(None if x is None else x.float().numpy() for x in (q, k, v)),
            batch=batch,
            pool=self.pool,
            layer=self.spec.layers[layer],
            heads=case.heads,
            scale=self.scale,
            rope=case.rope,
            q_norm=norm(self.q_norm, 1e-5),
            k_norm=norm(self.k_norm, 1e-6),
            softcap=case.softcap,
            sinks=self.reference.put([Dense(array=self.sinks)]) if case.sinks else None,
            causal=case.causal,
            kv_scales=case.kv_scales,
        )

    def hold(self, actual, expected):
        bound = COMPUTE_BOUNDS[self.case.dtype]
        if self.case.rope is not None or self.case.norms or self.case.kv in KV_LARGEST_CODE:
            bound += FLIP_BOUNDS[self.case.kv]
        elif self.case.dtype == torch.bfloat16:
            bound += FLIP_BOUNDS["bf16"]
        assert actual.shape == expected.shape
        assert np.isfinite(actual).all()
        largest = np.abs(expected).max(initial=0) or 1
        error = np.abs(actual - expected).max(initial=0) / largest
        assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def grow(case, first=37, second=5, seed=None):
    """A prefill, then another beside a decode, then decodes."""
    bench = Bench(case, seed=seed)
    a, b = bench.sequence(first + 10), bench.sequence(second + 10)
    bench.step([(a, first)])
    bench.step([(a, 1), (b, second)], pad=(3, 2))
    bench.step([(b, 1), (a, 1)], pad=(2, 2))
    return bench


@pytest.fixture
def short_parts(monkeypatch):
    """Contexts are split in parts of few tokens."""
    monkeypatch.setattr(attention_plan, "LEAST_PART", 16)


@pytest.mark.parametrize(
    ("kv", "dtype"),
    [
        *((kv, dtype) for kv in TORCH_KV for dtype in (torch.float32, torch.bfloat16)),
        ("f16", torch.float16),
        ("int8", torch.float16),
    ],
    ids=str,
)
def test_kv_dtypes(kv, dtype):
    grow(Case(kv=kv, dtype=dtype, rope=rope_of(32)), first=19)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("kv", TORCH_KV)
def test_contexts_in_parts(kv):
    """Part borders within and between pages, and more parts than the short context has tiles."""
    bench = grow(Case(kv=kv, units=12, page_size=8, sinks=True), first=35, second=18)
    bench.step([(bench.sequence(3), 2)])


@pytest.mark.usefixtures("short_parts")
def test_many_short_sequences_beside_a_prefill():
    bench = Bench(Case(units=32, dtype=torch.bfloat16, kv="bf16"))
    sequences = [bench.sequence(60) for _ in range(5)]
    bench.step([(s, n) for s, n in zip(sequences, (1, 30, 16, 17, 2), strict=True)])
    bench.step([(s, n) for s, n in zip(sequences, (3, 1, 20, 8, 1), strict=True)], pad=(5, 3))


@pytest.mark.parametrize("page_size", [1, 8, 16, 32])
@pytest.mark.parametrize("first", [1, 16, 33])
def test_page_boundaries(page_size, first):
    bench = Bench(Case(page_size=page_size), pages=50)
    a = bench.sequence(first + 4)
    bench.step([(a, first)])
    bench.step([(a, 1)])
    bench.step([(a, 2)])


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(8, 8), (40, 24), (64, 64), (80, 80), (96, 96), (112, 64), (192, 128), (256, 256), (576, 512)],
)
@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_head_dims(key_dim, value_dim, kv):
    grow(
        Case(
            key_dim=key_dim, value_dim=value_dim, kv=kv, rope=rope_of(key_dim // 4 * 2),
            key_heads=1, heads=2, layers=2,
        ),
        first=17,
        second=3,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 3), (9, 3), (5, 1), (14, 2), (71, 1)])
def test_groups(heads, key_heads):
    grow(Case(heads=heads, key_heads=key_heads, key_dim=16), first=19, second=4)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"sinks": True},
        {"norms": True, "rope": rope_of(32)},
        {"norms": True, "kv": "int8"},
        {"rope": rope_of(32, interleaved=True, scale=1.2)},
        {"rope": rope_of(24, scale=0.7), "norms": True, "kv": "fp8_e4m3"},
        {"causal": False},
        {"causal": False, "window": 6, "sinks": True, "softcap": 2.0},
        {"kv": "fp8_e4m3", "fp8": "ocp", "dtype": torch.bfloat16},
        {"kv": "fp8_e4m3", "fp8": "fnuz", "dtype": torch.float16},
        {"kv": "fp8_e4m3", "kv_scales": SCALES},
        {"kv": "fp8_e4m3", "kv_scales": SCALES, "rope": rope_of(24), "dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_options(options):
    grow(Case(**options), first=35)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("units", [1, 16])
@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_windows(window, units):
    """Pages behind the window are taken from the table, which is what the core does."""
    bench = Bench(Case(window=window, page_size=4, units=units))
    a, b = bench.sequence(70), bench.sequence(20)
    bench.step([(a, 50), (b, 3)])
    behind = max(0, 51 - window) // 4
    bench.step([(a, 7)], behind=behind)
    bench.step([(a, 1)], behind=behind)
    bench.step([(b, 1), (a, 3)], pad=(1, 1))


def test_keys_of_another_layer():
    """With neither k nor v, what the pool holds is attended to, and left alone."""
    case = Case(rope=rope_of(32), kv="bf16", dtype=torch.bfloat16)
    bench = grow(case)
    before = bench.planes.k.clone()
    case.shared = True
    a = SimpleNamespace(pages=[1, 2], length=20)
    bench.pool.plane("k", 4)[16:48] = bench.rng.standard_normal((32, 2, 32))
    bench.pool.plane("v", 4)[16:48] = bench.rng.standard_normal((32, 2, 32))
    for plane, name in ((before, "k"), (bench.planes.v, "v")):
        rows = torch.from_numpy(bench.pool.plane(name, 4)[16:48].astype(np.float32))
        plane[1, 1:3] = rows.view(2, 16, 2, 32).swapaxes(1, 2)
    bench.planes.k.copy_(before)
    bench.step([(a, 3)])
    assert torch.equal(bench.planes.k.view(torch.int16), before.view(torch.int16))


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("units", [1, 16])
def test_trees(window, units):
    """Tokens of a tree see the context and their ancestors; siblings have one position."""
    bench = Bench(Case(window=window, units=units, rope=rope_of(32)))
    a, b = bench.sequence(40), bench.sequence(40)
    bench.step([(a, 19), (b, 2)])
    parents = [-1, 0, 0, 1, 2, 2]
    mask = np.zeros((9, 7), np.bool_)
    depth = []
    for node, parent in enumerate(parents):
        mask[node, node] = True
        if parent >= 0:
            mask[node] |= mask[parent]
        depth.append(0 if parent < 0 else depth[parent] + 1)
    mask[6:, :3] = np.tril(np.ones((3, 3)))
    positions = [19 + d for d in depth] + [2, 3, 4]
    bench.step([(a, 6), (b, 3)], tree=mask, positions=positions, pad=(2, 1))


def test_tokens_that_see_nothing_give_zeros():
    bench = Bench(Case(sinks=True))
    a = bench.sequence(8)
    mask = np.tril(np.ones((3, 3), np.bool_))
    mask[0] = False
    output = bench.step([(a, 3)], tree=mask)
    assert not output[0].any()
    assert output[1].any()


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 0), (0, 2), (3, 1)])
def test_nothing_but_padding(tokens, sequences):
    bench = Bench(Case())
    bench.step([], pad=(tokens, sequences or 1))


def test_a_sequence_without_tokens_among_others():
    bench = Bench(Case())
    a, b = bench.sequence(20), bench.sequence(20)
    bench.step([(a, 17), (b, 2)])
    bench.step([(a, 0), (b, 3), (a, 0)], pad=(1, 0))


def test_padding_does_not_disturb_page_0_readers():
    """Rows of padding store what is not finite in page 0, which windows' tables point to."""
    bench = Bench(Case(window=3, page_size=2))
    a = bench.sequence(40)
    bench.step([(a, 20)], pad=(4, 1))
    bench.step([(a, 1)], pad=(4, 3), behind=8)


def test_float32_inputs_for_lower_precision():
    """q, k and v may come in float32 whatever A is."""
    bench = Bench(Case(dtype=torch.bfloat16, kv="bf16"))
    a = bench.sequence(20)
    batch = bench.on_device(bench.batch([(a, 6)]), 6, 1, None)
    q, k, v = bench.rounded(6, 128), bench.rounded(6, 64), bench.rounded(6, 64)
    outputs = [
        launchers.attention(
            q.to(dtype), k.to(dtype), v.to(dtype), batch, bench.planes, 0, bench.settings(),
            dtype=torch.bfloat16, tuning=bench.tuning,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]  # fmt: skip
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("kv", "kv_scales"),
    [("f16", None), ("int8", None), ("fp8_e4m3", None), ("fp8_e4m3", SCALES)],
    ids=["f16", "int8", "fp8_e4m3", "calibrated"],
)
def test_what_is_stored_is_what_the_reference_stores(kv, kv_scales):
    """To the byte where nothing is computed before; int8 turns, so a few codes are one off."""
    bench = Bench(Case(kv=kv, kv_scales=kv_scales, key_dim=48, value_dim=32))
    a = bench.sequence(20)
    bench.step([(a, 20)], layer=0)
    used = a.pages[:1] + a.pages[1:2]
    for name, plane in (("k", bench.planes.k), ("v", bench.planes.v)):
        expected = bench.pool.plane(name, 3).reshape(-1, 16, 2, plane.shape[-1]).swapaxes(1, 2)
        actual = plane[0].view(torch.uint8).numpy().view(expected.dtype)
        actual, expected = (x[used].astype(np.float32) for x in (actual, expected))
        actual, expected = (np.nan_to_num(x, nan=-1) for x in (actual, expected))
        if kv == "int8":
            assert np.abs(actual - expected).max() <= 1
            assert (actual != expected).mean() < 0.02
        else:
            assert np.array_equal(actual, expected)
        if kv_scales is not None:
            stored = getattr(bench.planes, f"{name}_scale")[0, used].swapaxes(1, 2).reshape(-1, 2)
            constants = np.tile(np.float32(getattr(kv_scales, name)), (20, 1))
            assert np.array_equal(stored[:20].numpy(), constants)


@pytest.mark.parametrize("attempt", range(4))
def test_random(attempt, monkeypatch):
    """Everything at random, in steps of whatever mix."""
    monkeypatch.setattr(attention_plan, "LEAST_PART", 16)
    rng = np.random.default_rng()
    key_heads = int(rng.integers(1, 4))
    dim = int(rng.choice([16, 24, 32, 48]))
    kv = str(rng.choice(list(TORCH_KV)))
    case = Case(
        heads=key_heads * int(rng.integers(1, 5)),
        key_heads=key_heads,
        key_dim=dim,
        value_dim=int(rng.choice([16, 32, 40])),
        page_size=int(rng.choice([1, 2, 8, 16, 32])),
        kv=kv,
        dtype=[torch.float32, torch.float16, torch.bfloat16][int(rng.integers(3))],
        window=int(rng.integers(1, 40)) if rng.random() < 0.4 else None,
        softcap=5.0 if rng.random() < 0.3 else None,
        sinks=rng.random() < 0.3,
        norms=rng.random() < 0.3,
        rope=rope_of(dim // 4 * 2, interleaved=rng.random() < 0.5) if rng.random() < 0.6 else None,
        causal=rng.random() < 0.8,
        units=int(rng.choice([1, 8, 16])),
    )
    print(case)
    bench = Bench(case, pages=300)
    sequences = [bench.sequence(60) for _ in range(3)]
    for _ in range(3):
        steps = [(s, int(rng.choice([0, 1, 1, 2, 17]))) for s in rng.permutation(sequences)]
        bench.step(steps, pad=(int(rng.integers(4)), int(rng.integers(3))))
