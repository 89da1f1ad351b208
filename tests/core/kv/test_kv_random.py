"""Random histories of the KV manager, held against a model that remembers what every slot holds.

The model runs a step's copies and writes when it is submitted, which is what in-order execution
amounts to, and keeps the set of pages that each step in flight touches, so that a page handed out
too early is found as well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polysilicon.kv import GroupSpec, KVManager, SequenceKV, root_identity

ROOTS = [
    root_identity(model="m", kv_dtype="f16", layout=1, adapter=adapter, salt=salt)
    for adapter, salt in ((None, None), ("a", None), (None, "s"))
]
KINDS: dict[str, tuple[int | None, ...]] = {
    "full": (None,),
    "two full": (None, None),
    "window": (5,),
    "window of one": (1,),
    "two windows": (3, 9),
    "hybrid": (None, 6),
    "hybrid, window first": (7, None, 2),
}
MAX_LENGTH = 40
# Tokens that differ in the first, the last or every byte of their encoding.
ALPHABET = (0, 1, 1 << 24, 0x01020304)


@dataclass(eq=False)
class Running:
    kv: SequenceKV
    root: bytes
    tokens: list[int]
    computed: int
    committed: int


@dataclass
class InFlight:
    number: int
    pages: set[tuple[int, int]] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)


class Simulation:
    def __init__(
        self,
        *,
        windows: tuple[int | None, ...],
        page_size: int,
        pages: tuple[int, ...],
        sequences: int = 6,
        prefix_cache: bool = True,
        ample: bool = False,
    ) -> None:
        groups = [
            GroupSpec(name=str(index), pages=count, window=window)
            for index, (count, window) in enumerate(zip(pages, windows, strict=True))
        ]
        self.windows = windows
        self.size = page_size
        self.ample = ample
        self.kv = KVManager(
            groups=groups,
            page_size=page_size,
            max_sequences=sequences,
            max_length=MAX_LENGTH,
            prefix_cache=prefix_cache,
        )
        self.content: list[dict[int, object]] = [{} for _ in windows]
        self.running: list[Running] = []
        self.waiting: list[tuple[bytes, list[int]]] = []
        self.flight: list[InFlight] = []
        self.cached: list[tuple[bytes, list[int]]] = []
        self.copies: list[tuple[Running, Any]] = []
        self.garbage = 0
        self.counts: Counter[str] = Counter()

    # What a page table says, by position

    def slot(self, group: int, running: Running, position: int) -> int:
        page = int(self.kv.page_tables[group][running.kv.row, position // self.size])
        assert page, f"no page for position {position}"
        return page * self.size + position % self.size

    def first_visible(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def truth(self, running: Running, position: int) -> object:
        return running.root, tuple(running.tokens[: position + 1])

    def check_fresh(self, running: Running, first_page: int) -> None:
        used = running.kv.capacity // self.size
        for group, table in enumerate(self.kv.page_tables):
            for page in table[running.kv.row, first_page:used].tolist():
                for step in self.flight:
                    assert (group, page) not in step.pages, "a page in flight is handed out"
                # The content that was there is dead: nobody may count on it any more.
                for slot in range(page * self.size, (page + 1) * self.size):
                    self.content[group].pop(slot, None)

    # Operations

    def open(self, random: Random) -> None:
        if self.waiting and random.random() < 0.5:
            root, tokens = self.waiting.pop(random.randrange(len(self.waiting)))
        else:
            root, tokens = random.choice(ROOTS), []
            if self.cached and random.random() < 0.7:
                root_before, before = random.choice(self.cached)
                tokens = before[: random.randint(0, len(before))]
                root = root_before if random.random() < 0.8 else root
            tokens = tokens + [random.choice(ALPHABET) for _ in range(random.randint(0, 12))]
            tokens = tokens[: MAX_LENGTH - 1] or [0]
        reuse = random.random() < 0.9
        given = tokens if random.random() < 0.5 else np.array(tokens, np.int32)
        usage = self.kv.usage()
        kv = self.kv.open(given, root, reuse=reuse)
        if kv is None:
            assert usage == self.kv.usage()
            assert self.running or self.flight, "no row is free though nobody holds one"
            self.waiting.append((root, tokens))
            return
        assert all(kv.row not in step.rows for step in self.flight), "a row in flight is given out"
        assert kv.row not in [other.kv.row for other in self.running]
        cached = kv.num_cached_tokens
        assert 0 <= cached < len(tokens)
        if not (reuse and self.kv.prefix_cache):
            assert cached == 0
        elif self.ample:
            assert cached == self.longest(root, tokens), "not the longest prefix"
        running = Running(kv, root, list(tokens), cached, cached)
        whole = cached // self.size
        self.check_fresh(running, whole)
        assert bool(kv.copies) == (cached % self.size != 0)
        held = [dict(content) for content in self.content]
        for group, source, target in kv.copies:
            assert source.dtype == target.dtype == np.int32
            for one, other in zip(source.tolist(), target.tolist(), strict=True):
                held[group][other] = held[group][one]
        self.copies += [(running, copy) for copy in kv.copies]
        for group in range(len(self.windows)):
            for position in range(self.first_visible(group, cached), cached):
                found = held[group].get(self.slot(group, running, position))
                assert found == self.truth(running, position), "a cached slot holds something else"
        self.counts["hits"] += cached > 0
        self.counts["copies"] += bool(kv.copies)
        self.running.append(running)

    def longest(self, root: bytes, tokens: list[int]) -> int:
        best = 0
        known = [tokens for owner, tokens in self.cached if owner == root]
        for running in self.running:
            if running.root == root:
                known.append(running.tokens[: running.committed // self.size * self.size])
        for other in known:
            shared = 0
            while shared < min(len(other), len(tokens) - 1) and other[shared] == tokens[shared]:
                shared += 1
            best = max(best, shared)
        return best

    def step(self, random: Random) -> None:
        if len(self.flight) == 3:
            self.end()
        work: list[tuple[Running, int, int]] = []
        for running in list(self.running):
            if running not in self.running or random.random() < 0.2:
                continue
            if running.computed == len(running.tokens) < MAX_LENGTH:
                running.tokens.append(random.choice(ALPHABET))
            behind = len(running.tokens) - running.computed
            if not behind:
                continue
            count = random.randint(1, min(behind, random.choice([1, 4, MAX_LENGTH])))
            drafts = 0
            if count == behind:
                drafts = random.randint(0, min(3, MAX_LENGTH - len(running.tokens)))
            total = running.computed + count + drafts
            before = running.kv.capacity // self.size
            usage, tables = self.kv.usage(), [table.copy() for table in self.kv.page_tables]
            if self.kv.grow(running.kv, total):
                self.check_fresh(running, before)
                work.append((running, count, drafts))
                continue
            assert usage == self.kv.usage(), "a failed grow changed something"
            for table, old in zip(self.kv.page_tables, tables, strict=True):
                assert np.array_equal(table, old)
            self.counts["failed"] += 1
            scheduled = [entry[0] for entry in work]
            victims = [other for other in self.running if other not in scheduled]
            self.close(random, victim=random.choice(victims), preempt=True)
        step = InFlight(0)
        for running, (group, source, target) in self.copies:
            assert running in self.running
            for one, other in zip(source.tolist(), target.tolist(), strict=True):
                self.content[group][other] = self.content[group][one]
                step.pages |= {(group, one // self.size), (group, other // self.size)}
        self.copies.clear()
        for running, count, drafts in work:
            self.run(step, running, count, drafts)
        step.number = self.kv.step_submitted()
        self.flight.append(step)
        for running, count, _ in work:
            running.computed += count
            if random.random() < 0.8:
                running.committed = random.randint(running.committed, running.computed)
                self.kv.commit(running.kv, running.tokens, running.committed)

    def run(self, step: InFlight, running: Running, count: int, drafts: int) -> None:
        step.rows.add(running.kv.row)
        for group in range(len(self.windows)):
            for position in range(running.computed, running.computed + count + drafts):
                slot = self.slot(group, running, position)
                step.pages.add((group, slot // self.size))
                if position < running.computed + count:
                    self.content[group][slot] = self.truth(running, position)
                else:
                    self.garbage += 1
                    self.content[group][slot] = self.garbage
            for query in range(running.computed, running.computed + count):
                for position in range(self.first_visible(group, query), query + 1):
                    slot = self.slot(group, running, position)
                    step.pages.add((group, slot // self.size))
                    found = self.content[group].get(slot)
                    assert found == self.truth(running, position), "attention reads another's KV"

    def end(self) -> None:
        if self.flight:
            self.kv.step_ended(self.flight.pop(0).number)

    def close(self, random: Random, victim: Running | None = None, preempt: bool = False) -> None:
        if not self.running:
            return
        running = victim or random.choice(self.running)
        self.running.remove(running)
        pending = any(owner is running for owner, _ in self.copies)
        self.copies = [(owner, copy) for owner, copy in self.copies if owner is not running]
        length = random.choice(
            [running.computed, random.randint(running.committed, running.computed)]
        )
        self.kv.close(running.kv, running.tokens, length)
        if pending:
            length = length // self.size * self.size
        self.cached.append((running.root, running.tokens[:length]))
        if preempt:
            self.waiting.append((running.root, running.tokens))

    def reset(self) -> None:
        self.kv.reset()
        self.cached.clear()
        for group in self.kv.usage():
            assert group.cached == 0

    def check(self) -> None:
        self.kv.check_integrity()
        for group, usage in enumerate(self.kv.usage()):
            assert usage.total == usage.free + usage.cached + usage.in_use + usage.limbo
            assert min(usage.free, usage.cached, usage.in_use, usage.limbo) >= 0
            held = {
                page
                for running in self.running
                for page in self.kv.page_tables[group][running.kv.row].tolist()
            } - {0}
            sources = {
                source[0] // self.size for _, (other, source, _) in self.copies if other == group
            }
            assert usage.in_use == len(held | sources)
        owners: Counter[tuple[int, int]] = Counter()
        for running in self.running:
            for group, table in enumerate(self.kv.page_tables):
                private = table[running.kv.row, running.committed // self.size :].tolist()
                owners.update((group, page) for page in set(private) - {0})
        if not self.kv.prefix_cache:
            assert all(count == 1 for count in owners.values()), "two sequences write to one page"

    def drain(self, random: Random) -> None:
        """Close everything, end every step, drop the cache: every page must be free again."""
        while self.running:
            self.close(random)
            self.check()
        while self.flight:
            self.end()
            self.check()
        self.reset()
        self.check()
        assert not self.kv.tree.roots
        assert sorted(self.kv.free_rows) == list(range(len(self.kv.sequences)))
        for usage in self.kv.usage():
            assert usage.free == usage.total


def operate(simulation: Simulation, random: Random) -> None:
    dice = random.random()
    if dice < 0.3:
        simulation.open(random)
    elif dice < 0.65:
        simulation.step(random)
    elif dice < 0.85:
        simulation.end()
    elif dice < 0.99 or simulation.ample:
        simulation.close(random)
    else:
        simulation.reset()
    simulation.check()


def small_pool(random: Random, window: int | None, page_size: int) -> int:
    """Pages for a group: from fewer than one sequence needs to enough for two or three."""
    whole = -(-MAX_LENGTH // page_size)
    if window is None:
        return max(2, whole + random.choice([-whole // 2, 0, 2, whole]))
    return 2 + -(-window // page_size) + random.choice([0, 1, 3, 8, whole])


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_in_small_pools(kind: str, page_size: int) -> None:
    random = Random(f"{kind} {page_size}")
    failed = hits = 0
    for _ in range(8):
        pages = tuple(small_pool(random, window, page_size) for window in KINDS[kind])
        simulation = Simulation(windows=KINDS[kind], page_size=page_size, pages=pages)
        for _ in range(60):
            operate(simulation, random)
        simulation.drain(random)
        failed += simulation.counts["failed"]
        hits += simulation.counts["hits"]
    assert hits
    assert failed


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_with_room_enough_a_hit_is_the_longest_prefix(kind: str, page_size: int) -> None:
    random = Random(f"ample {kind} {page_size}")
    simulation = Simulation(
        windows=KINDS[kind],
        page_size=page_size,
        pages=(9000,) * len(KINDS[kind]),
        ample=True,
    )
    for _ in range(200):
        operate(simulation, random)
    simulation.drain(random)
    assert simulation.counts["hits"]
    assert page_size == 1 or simulation.counts["copies"]


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("kind", ["full", "window", "hybrid"])
def test_random_histories_without_prefix_cache(kind: str, page_size: int) -> None:
    random = Random(f"plain {kind} {page_size}")
    pages = tuple(small_pool(random, window, page_size) for window in KINDS[kind])
    simulation = Simulation(
        windows=KINDS[kind], page_size=page_size, pages=pages, prefix_cache=False
    )
    for _ in range(200):
        operate(simulation, random)
        assert all(usage.cached == 0 for usage in simulation.kv.usage())
        assert simulation.kv.prefix_queries == simulation.kv.prefix_hits == 0
    simulation.drain(random)


class Histories(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        page_size=st.sampled_from([1, 3, 4, 16]),
        pools=st.integers(0, 2**32),
        sequences=st.integers(1, 6),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(
        self, kind: str, page_size: int, pools: int, sequences: int, prefix_cache: bool
    ) -> None:
        random = Random(pools)
        self.simulation = Simulation(
            windows=KINDS[kind],
            page_size=page_size,
            pages=tuple(small_pool(random, window, page_size) for window in KINDS[kind]),
            sequences=sequences,
            prefix_cache=prefix_cache,
        )

    @rule(seed=st.integers(0, 2**32))
    def open(self, seed: int) -> None:
        self.simulation.open(Random(seed))

    @rule(seed=st.integers(0, 2**32))
    def step(self, seed: int) -> None:
        self.simulation.step(Random(seed))

    @rule()
    def end(self) -> None:
        self.simulation.end()

    @rule(seed=st.integers(0, 2**32), preempt=st.booleans())
    def close(self, seed: int, preempt: bool) -> None:
        self.simulation.close(Random(seed), preempt=preempt)

    @rule()
    def reset(self) -> None:
        self.simulation.reset()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain(Random(0))


Histories.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHistories = Histories.TestCase
