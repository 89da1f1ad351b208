from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from polysilicon.errors import ConfigError
from polysilicon.kv import GroupSpec, KVManager, SequenceKV

managers: list[KVManager] = []


@pytest.fixture(autouse=True)
def _integrity() -> Iterator[None]:
    managers.clear()
    yield
    for manager in managers:
        manager.check_integrity()


def make(
    *windows: int | None,
    pages: int | Sequence[int] = 20,
    page_size: int = 4,
    max_sequences: int = 4,
    max_length: int = 64,
    prefix_cache: bool = True,
) -> KVManager:
    counts = [pages] * len(windows) if isinstance(pages, int) else pages
    manager = KVManager(
        groups=[
            GroupSpec(name=f"group {index}", pages=count, window=window)
            for index, (count, window) in enumerate(zip(counts, windows, strict=True))
        ],
        page_size=page_size,
        max_sequences=max_sequences,
        max_length=max_length,
        prefix_cache=prefix_cache,
    )
    managers.append(manager)
    return manager


def start(kv: KVManager, tokens: list[int], *, root: bytes = b"root") -> SequenceKV:
    """Open a sequence and compute all its tokens in one step that has ended."""
    sequence = kv.open(tokens, root)
    assert sequence is not None
    assert kv.grow(sequence, len(tokens))
    kv.step_ended(kv.step_submitted())
    kv.commit(sequence, tokens, len(tokens))
    kv.check_integrity()
    return sequence


def cache(kv: KVManager, tokens: list[int], *, root: bytes = b"root") -> None:
    kv.close(start(kv, tokens, root=root), tokens, len(tokens))
    kv.check_integrity()


def hit(kv: KVManager, tokens: list[int], *, root: bytes = b"root") -> int:
    """The length of the prefix that is found now, which counts as a use of it."""
    sequence = kv.open(tokens, root)
    assert sequence is not None
    kv.check_integrity()
    found = sequence.num_cached_tokens
    kv.close(sequence, tokens, found)
    kv.check_integrity()
    return found


def row(kv: KVManager, sequence: SequenceKV, group: int = 0) -> list[int]:
    return [int(page) for page in kv.page_tables[group][sequence.row]]


# Rows and pages


def test_rows_are_the_lowest_free_and_wait_for_the_steps_in_flight() -> None:
    kv = make(None, max_sequences=3)
    first, second, third = (kv.open([1], b"r") for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [first.row, second.row, third.row] == [0, 1, 2]
    assert kv.open([1], b"r") is None
    step = kv.step_submitted()
    kv.close(second, [1], 0)
    assert kv.open([1], b"r") is None
    kv.step_ended(step)
    kv.close(first, [1], 0)
    again = kv.open([1], b"r")
    assert again is not None
    assert again.row == 0


def test_grow_takes_whole_pages_once() -> None:
    kv = make(None, 6, pages=5)
    sequence = kv.open([0] * 5, b"r")
    assert sequence is not None
    assert kv.grow(sequence, 5)
    assert sequence.capacity == 8
    table = row(kv, sequence)
    assert kv.grow(sequence, 8)
    assert row(kv, sequence) == table
    assert sorted(table)[-2:] == sorted(set(table) - {0})
    assert not kv.grow(sequence, 17)
    assert row(kv, sequence) == table
    assert kv.grow(sequence, 16)
    assert [usage.free for usage in kv.usage()] == [0, 0]


def test_page_tables_have_room_for_the_longest_sequence() -> None:
    kv = make(None, pages=30, max_length=9)
    assert kv.page_tables[0].shape == (4, 3)
    assert kv.page_tables[0].dtype == np.int32
    sequence = kv.open([0] * 9, b"r")
    assert sequence is not None
    assert kv.grow(sequence, 9)
    with pytest.raises(AssertionError, match="max_length"):
        kv.grow(sequence, 13)
    with pytest.raises(AssertionError, match="max_length"):
        kv.open([0] * 10, b"r")


def test_a_freed_page_waits_for_every_step_submitted_before() -> None:
    kv = make(None, pages=3, prefix_cache=False)
    sequence = kv.open([0] * 8, b"r")
    assert sequence is not None
    assert kv.grow(sequence, 8)
    first, second = kv.step_submitted(), kv.step_submitted()
    kv.close(sequence, [0] * 8, 8)
    other = kv.open([0], b"r")
    assert other is not None
    assert kv.usage()[0].limbo == 2
    assert not kv.grow(other, 1)
    kv.step_ended(first)
    assert not kv.grow(other, 1)
    kv.step_ended(second)
    assert kv.grow(other, 1)


def test_a_cached_page_that_a_step_in_flight_reads_is_not_evicted() -> None:
    kv = make(None, pages=3)
    old, new = [1] * 4, [2] * 4
    cache(kv, old)
    sequence = kv.open(new, b"root")
    assert sequence is not None
    assert kv.grow(sequence, 4)
    step = kv.step_submitted()
    kv.close(sequence, new, 4)
    other = kv.open([3] * 8, b"root")
    assert other is not None
    assert not kv.grow(other, 8)
    assert kv.usage()[0].cached == 2
    assert kv.grow(other, 4)
    assert kv.usage()[0].cached == 1
    kv.step_ended(step)
    assert kv.grow(other, 8)


@pytest.mark.parametrize("windows", [(None,), (100,), (None, 100)])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_that_wait_for_a_step_are_worth_waiting_for(
    windows: tuple[int | None, ...], prefix_cache: bool
) -> None:
    kv = make(*windows, pages=3, prefix_cache=prefix_cache)
    sequence, other = kv.open([1] * 8, b"root"), kv.open([2] * 8, b"root")
    assert sequence is not None
    assert other is not None
    assert kv.grow(sequence, 8)
    step = kv.step_submitted()
    assert not kv.grow(other, 8)
    assert not kv.reclaiming()
    kv.close(sequence, [1] * 8, 8)
    assert not kv.grow(other, 8)
    assert kv.reclaiming()
    kv.step_ended(step)
    assert not kv.reclaiming()
    assert kv.grow(other, 8)


def test_steps_end_in_order() -> None:
    kv = make(None)
    assert [kv.step_submitted(), kv.step_submitted()] == [1, 2]
    with pytest.raises(AssertionError, match="step 2 ended"):
        kv.step_ended(2)
    kv.step_ended(1)
    kv.step_ended(2)
    with pytest.raises(AssertionError, match="step 3 ended"):
        kv.step_ended(3)


# Prefix hits


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 3), (5, 4), (8, 7), (9, 8), (12, 9)])
def test_at_least_one_token_is_left_to_compute(length: int, found: int) -> None:
    kv = make(None)
    tokens = list(range(12))
    cache(kv, tokens[:9])
    assert hit(kv, tokens[:length]) == found


def test_an_empty_prompt_is_no_hit() -> None:
    kv = make(None, 3)
    cache(kv, [1, 2, 3, 4, 5])
    assert hit(kv, []) == 0


def test_whole_pages_are_shared_and_locked_once_per_sequence() -> None:
    kv = make(None)
    tokens = list(range(10))
    first = start(kv, tokens)
    second = kv.open(tokens[:9], b"root")
    third = kv.open([*tokens[:4], 99, 99], b"root")
    assert second is not None
    assert third is not None
    assert (second.num_cached_tokens, third.num_cached_tokens) == (8, 4)
    assert row(kv, second)[:2] == row(kv, first)[:2]
    assert row(kv, third)[0] == row(kv, first)[0]
    assert [node.lock for node in first.nodes] == [3, 2]
    assert kv.tree.roots[b"root"].lock == 3
    kv.close(first, tokens, 10)
    kv.check_integrity()
    assert [node.lock for node in second.nodes] == [2, 1]
    kv.close(second, tokens, 8)
    kv.close(third, tokens, 4)
    assert kv.usage()[0].in_use == 0


def test_a_page_shared_in_part_is_copied_in_every_group() -> None:
    kv = make(None, 20)
    tokens = list(range(11))
    first = start(kv, tokens)
    second = kv.open([*tokens[:6], 99, 99], b"root")
    assert second is not None
    assert second.num_cached_tokens == 6
    assert [group for group, _, _ in second.copies] == [0, 1]
    for group, source, target in second.copies:
        assert source.tolist() == [row(kv, first, group)[1] * 4 + offset for offset in (0, 1)]
        assert target.tolist() == [row(kv, second, group)[1] * 4 + offset for offset in (0, 1)]
        assert row(kv, second, group)[1] != row(kv, first, group)[1]
    assert first.nodes[1].lock == 2
    kv.step_submitted()
    assert first.nodes[1].lock == 1
    assert second.copies == []


def test_a_cached_partial_page_is_reused() -> None:
    kv = make(None)
    tokens = list(range(7))
    cache(kv, tokens)
    second = kv.open([*tokens, 7, 8], b"root")
    assert second is not None
    assert second.num_cached_tokens == 7
    ((_, source, target),) = second.copies
    assert len(source) == len(target) == 3


def test_closed_before_its_copy_a_sequence_leaves_nothing_of_it_behind() -> None:
    kv = make(None, 100)
    # The sibling in front covers the partial page but for its sliding-window page.
    cache(kv, [1, 2, 3, 3])
    cache(kv, [1, 2, 3, 4])
    (front,) = [node for node in kv.tree.unlocked if node.key.endswith(b"\3\0\0\0")]
    kv.tree.remove_window_page(front, 1)
    sequence = kv.open([1, 2, 3, 9], b"root")
    assert sequence is not None
    assert sequence.num_cached_tokens == 3
    kv.check_integrity()
    kv.close(sequence, [1, 2, 3, 9], 3)
    assert len(kv.tree.unlocked) == 2
    assert kv.usage()[0].free == 17


def test_a_copy_never_starves_the_sequence_it_is_for() -> None:
    kv = make(None, pages=4)
    cache(kv, [1, 2, 3])
    tokens = [1, 2, *range(10, 20)]
    sequence = kv.open(tokens, b"root")
    assert sequence is not None
    assert sequence.num_cached_tokens == 0
    assert kv.grow(sequence, 12)
    kv.close(sequence, tokens, 0)
    roomy = make(None, pages=5)
    cache(roomy, [1, 2, 3])
    sequence = roomy.open(tokens, b"root")
    assert sequence is not None
    assert sequence.num_cached_tokens == 2
    assert roomy.grow(sequence, 12)


def test_reuse_can_be_declined_and_switched_off() -> None:
    kv = make(None)
    tokens = list(range(9))
    cache(kv, tokens)
    sequence = kv.open(tokens, b"root", reuse=False)
    assert sequence is not None
    assert sequence.num_cached_tokens == 0
    assert (kv.prefix_queries, kv.prefix_hits) == (9, 0)
    off = make(None, prefix_cache=False)
    cache(off, tokens)
    assert off.usage()[0].free == 19
    assert hit(off, tokens) == 0
    assert off.prefix_queries == 0


def test_queries_and_hits_are_counted_in_tokens() -> None:
    kv = make(None)
    cache(kv, list(range(8)))
    hit(kv, list(range(10)))
    hit(kv, [9, 9])
    assert (kv.prefix_queries, kv.prefix_hits) == (8 + 10 + 2, 8)


def test_the_best_of_many_children_is_found() -> None:
    kv = make(None, pages=6000, page_size=8)
    generator = np.random.default_rng(3)
    pages = {tuple(page) for page in generator.integers(0, 4, (4000, 8)).tolist()}
    for page in pages:
        sequence = kv.open(page, b"root", reuse=False)
        assert sequence is not None
        assert kv.grow(sequence, 8)
        kv.close(sequence, page, 8)
    kv.check_integrity()
    assert len(kv.tree.roots[b"root"].children) == len(pages)
    for wanted in generator.integers(0, 5, (200, 9)).tolist():
        best = max(next((i for i in range(8) if page[i] != wanted[i]), 8) for page in pages)
        sequence = kv.open(wanted, b"root")
        assert sequence is not None
        assert sequence.num_cached_tokens == best
        kv.close(sequence, wanted, 0)


@pytest.mark.timeout(60)
def test_a_prompt_of_128k_tokens_is_cached_and_found() -> None:
    kv = make(None, 4096, pages=9000, page_size=16, max_length=131_072 + 16)
    tokens = np.arange(131_072, dtype=np.int32)
    sequence = kv.open(tokens, b"root")
    assert sequence is not None
    assert kv.grow(sequence, len(tokens))
    kv.commit(sequence, tokens, len(tokens))
    kv.close(sequence, tokens, len(tokens))
    again = kv.open(tokens, b"root")
    assert again is not None
    assert again.num_cached_tokens == len(tokens) - 1
    assert len(again.nodes) == 8191
    assert kv.grow(again, len(tokens) + 1)
    kv.close(again, tokens, 0)


# Committing


def test_a_finished_page_can_be_shared_at_once() -> None:
    kv = make(None)
    tokens = list(range(9))
    first = kv.open(tokens, b"root")
    assert first is not None
    assert kv.grow(first, 9)
    kv.commit(first, tokens, 3)
    assert hit(kv, tokens) == 0
    kv.commit(first, tokens, 4)
    assert hit(kv, tokens) == 4
    kv.commit(first, tokens, 9)
    assert hit(kv, tokens) == 8


@pytest.mark.parametrize("as_array", [False, True])
def test_the_same_page_computed_twice_is_kept_once(as_array: bool) -> None:
    kv = make(None, 100)
    tokens = list(range(10))
    given = np.array(tokens, np.int32) if as_array else tokens
    first, second = kv.open(given, b"root"), kv.open(given, b"root")
    assert first is not None
    assert second is not None
    for sequence in (first, second):
        assert kv.grow(sequence, 10)
    step = kv.step_submitted()
    kv.commit(first, given, 10)
    own = [row(kv, second, group) for group in range(2)]
    kv.commit(second, given, 10)
    for group in range(2):
        assert row(kv, second, group)[:2] == row(kv, first, group)[:2]
        assert row(kv, second, group)[2] == own[group][2]
        assert kv.usage()[group].limbo == 2
    assert first.nodes == second.nodes
    kv.check_integrity()
    kv.step_ended(step)
    assert [usage.in_use for usage in kv.usage()] == [4, 4]


def test_a_fuller_page_replaces_a_partial_one() -> None:
    kv = make(None)
    cache(kv, [1, 2])
    cache(kv, [1, 2, 3])
    assert kv.usage()[0].cached == 1
    cache(kv, [1, 5])
    assert kv.usage()[0].cached == 2
    cache(kv, [1, 2, 3, 4])
    assert kv.usage()[0].cached == 2
    cache(kv, [1, 2])
    assert kv.usage()[0].cached == 2
    assert hit(kv, [1, 5, 9]) == 2
    assert hit(kv, [1, 2, 3, 9]) == 3


def test_a_locked_partial_page_goes_when_it_is_unlocked() -> None:
    kv = make(None)
    cache(kv, [1, 2])
    waiting = kv.open([1, 2, 7], b"root")
    assert waiting is not None
    assert waiting.copies
    other = kv.open([1, 2, 3, 4], b"root", reuse=False)
    assert other is not None
    assert kv.grow(other, 4)
    kv.close(other, [1, 2, 3, 4], 4)
    kv.check_integrity()
    assert len(kv.tree.roots[b"root"].children) == 2
    kv.step_submitted()
    assert len(kv.tree.roots[b"root"].children) == 1


# Windows


def test_pages_behind_the_window_are_let_go() -> None:
    kv = make(None, 5)
    tokens = list(range(40))
    sequence = start(kv, tokens[:7])
    assert 0 not in row(kv, sequence, 1)[:2]
    kv.commit(sequence, tokens, 8)
    # A query at 8 sees 4 to 8, so that the first page is out of sight.
    assert row(kv, sequence, 1)[0] == 0
    assert row(kv, sequence, 0)[0] != 0
    assert kv.usage()[1].cached == 1
    assert kv.grow(sequence, 12)
    kv.commit(sequence, tokens, 11)
    assert row(kv, sequence, 1)[1] != 0
    kv.commit(sequence, tokens, 12)
    assert row(kv, sequence, 1)[:2] == [0, 0]
    assert 0 not in row(kv, sequence, 0)[:3]
    assert [node.window_locks[1] for node in sequence.nodes] == [0, 0, 1]


def test_without_prefix_cache_pages_behind_the_window_are_free() -> None:
    kv = make(5, pages=4, prefix_cache=False)
    tokens = list(range(60))
    sequence = kv.open(tokens[:1], b"root")
    assert sequence is not None
    for length in range(1, 61):
        assert kv.grow(sequence, length)
        kv.step_ended(kv.step_submitted())
        kv.commit(sequence, tokens, length)
        kv.check_integrity()
    assert kv.usage()[0].cached == 0


def test_a_window_group_runs_on_few_pages_with_the_cache_full() -> None:
    kv = make(None, 5, pages=(40, 4))
    tokens = list(range(60))
    sequence = kv.open(tokens[:1], b"root")
    assert sequence is not None
    for length in range(1, 61):
        assert kv.grow(sequence, length)
        kv.step_ended(kv.step_submitted())
        kv.commit(sequence, tokens, length)
        kv.check_integrity()
    kv.close(sequence, tokens, 60)
    assert kv.usage()[0].cached == 15
    assert kv.usage()[1].cached == 3


def test_a_hit_needs_the_last_window_only() -> None:
    kv = make(None, 5)
    tokens = list(range(20))
    cache(kv, tokens)
    path = _path(kv, tokens)
    for node in path[:3]:
        kv.tree.remove_window_page(node, 1)
    kv.check_integrity()
    # A query at 16 sees 12 to 16, one at 15 sees 11.
    assert hit(kv, [*tokens[:16], 99]) == 16
    assert hit(kv, [*tokens[:15], 99]) == 0
    sequence = kv.open([*tokens[:16], 99], b"root")
    assert sequence is not None
    assert row(kv, sequence, 1)[:3] == [0, 0, 0]
    assert 0 not in row(kv, sequence, 0)[:4]
    assert [node.window_locks[1] for node in sequence.nodes] == [0, 0, 0, 1]


def test_a_hit_is_shortened_to_where_the_windows_are_whole() -> None:
    kv = make(None, 5, 2)
    tokens = list(range(24))
    cache(kv, tokens)
    path = _path(kv, tokens)
    kv.tree.remove_window_page(path[4], 1)
    assert hit(kv, [*tokens, 99]) == 24
    kv.tree.remove_window_page(path[5], 2)
    assert hit(kv, [*tokens, 99]) == 16
    kv.tree.remove_window_page(path[3], 2)
    # The next page lacks one group's page, so that no part of it can add to these twelve.
    assert hit(kv, [*tokens, 99]) == 12


def test_a_partial_page_saves_a_path_that_is_short_of_a_page() -> None:
    kv = make(None, 5)
    tokens = list(range(11))
    cache(kv, tokens)
    path = _path(kv, tokens)
    kv.tree.remove_window_page(path[0], 1)
    # A query at 11 sees 7 to 11, one at 7 sees 3, one at 8 sees 4.
    assert hit(kv, [*tokens, 99]) == 11
    assert hit(kv, [*tokens[:8], 99]) == 8
    assert hit(kv, [*tokens[:7], 99]) == 0
    kv.tree.remove_window_page(path[1], 1)
    assert hit(kv, [*tokens, 99]) == 0


def test_a_page_that_was_evicted_is_put_back_by_who_computes_it_again() -> None:
    kv = make(None, 9)
    tokens = list(range(8))
    cache(kv, tokens)
    path = _path(kv, tokens)
    kv.tree.remove_window_page(path[1], 1)
    kept = path[1].pages[0]
    again = kv.open(tokens, b"root", reuse=False)
    assert again is not None
    assert kv.grow(again, 8)
    own = row(kv, again, 1)[1]
    kv.commit(again, tokens, 8)
    assert path[1].pages == [kept, own]
    assert row(kv, again, 0)[1] == kept


def test_a_node_without_any_page_leaves_a_model_of_windows_only() -> None:
    kv = make(3, 5)
    tokens = list(range(12))
    cache(kv, tokens)
    path = _path(kv, tokens)
    for group in range(2):
        kv.tree.remove_window_page(path[0], group)
    assert path[0].parent is not None
    for group in range(2):
        kv.tree.remove_window_page(path[2], group)
    assert path[2].parent is None
    for group in range(2):
        kv.tree.remove_window_page(path[1], group)
    assert kv.tree.roots == {}


def _path(kv: KVManager, tokens: list[int]) -> list:
    node, path = kv.tree.roots[b"root"], []
    data = np.array(tokens, "<i4").tobytes()
    while data:
        node = node.children[data[: kv.tree.page_bytes]]
        data = data[kv.tree.page_bytes :]
        path.append(node)
    return path


# Eviction


def test_the_least_recently_used_leaf_goes_first() -> None:
    kv = make(None, pages=7)
    for first in (1, 2, 3):
        cache(kv, [first] * 8)
    assert hit(kv, [1] * 9) == 8
    sequence = kv.open([9] * 4, b"root")
    assert sequence is not None
    assert kv.grow(sequence, 4)
    # Of the oldest path the leaf went, and its parent stayed.
    assert {len(_branch(kv, first)) for first in (1, 3)} == {2}
    assert len(_branch(kv, 2)) == 1
    assert kv.grow(sequence, 12)
    assert [len(_branch(kv, first)) for first in (1, 2, 3)] == [2, 0, 1]
    assert kv.grow(sequence, 24)
    assert kv.usage()[0].cached == 0


def _branch(kv: KVManager, token: int) -> list[int]:
    node = kv.tree.roots[b"root"].children.get(np.full(4, token, "<i4").tobytes())
    pages = []
    while node is not None:
        pages.append(node.pages[0])
        node = next(iter(node.children.values()), None)
    return pages


def test_a_locked_path_is_never_evicted() -> None:
    kv = make(None, pages=5)
    tokens = [1] * 8
    cache(kv, tokens)
    holder = kv.open([*tokens, 2], b"root")
    assert holder is not None
    other = kv.open([3] * 12, b"root")
    assert other is not None
    assert not kv.grow(other, 12)
    assert kv.grow(other, 8)
    assert len(_branch(kv, 1)) == 2


def test_full_and_window_pages_are_evicted_apart() -> None:
    kv = make(None, 4, pages=(20, 5))
    cache(kv, [1] * 8)
    cache(kv, [2] * 8)
    assert [usage.cached for usage in kv.usage()] == [4, 4]
    sequence = kv.open([3] * 4, b"root")
    assert sequence is not None
    assert kv.grow(sequence, 4)
    assert [usage.cached for usage in kv.usage()] == [4, 3]
    kv.close(sequence, [3] * 4, 0)
    scarce = make(None, 4, pages=(5, 20))
    cache(scarce, [1] * 8)
    cache(scarce, [2] * 8)
    sequence = scarce.open([3] * 4, b"root")
    assert sequence is not None
    assert scarce.grow(sequence, 4)
    # The leaf took its sliding-window page along.
    assert [usage.cached for usage in scarce.usage()] == [3, 3]


def test_usage_adds_up_and_reset_empties_the_cache() -> None:
    kv = make(None, 5, pages=(20, 10))
    cache(kv, list(range(10)))
    sequence = start(kv, [9, *range(7)])
    step = kv.step_submitted()
    kv.close(sequence, [9, *range(7)], 3)
    live = start_behind(kv, list(range(9)), step)
    full, window = kv.usage()
    assert (full.total, full.name) == (19, "group 0")
    assert (full.free, full.cached, full.in_use, full.limbo) == (13, 3, 3, 0)
    assert window.total == 9
    assert window.free + window.cached + window.in_use + window.limbo == 9
    kv.reset()
    kv.check_integrity()
    assert [usage.cached for usage in kv.usage()] == [0, 0]
    assert kv.usage()[0].in_use == 3
    kv.close(live, list(range(9)), 9)
    kv.reset()
    assert [usage.free for usage in kv.usage()] == [19, 9]
    assert kv.tree.roots == {}


def start_behind(kv: KVManager, tokens: list[int], step: int) -> SequenceKV:
    kv.step_ended(step)
    return start(kv, tokens)


# Sizes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": []}, "no KV group"),
        ({"groups": [GroupSpec(name="x", pages=5, window=None)] * 2}, "same name"),
        ({"groups": [GroupSpec(name="x", pages=1, window=None)]}, "more memory"),
        ({"groups": [GroupSpec(name="x", pages=5, window=0)]}, "window of 0"),
        ({"page_size": 0}, "page size is 0"),
        ({"max_sequences": 0}, "number of sequences is 0"),
        ({"max_length": -1}, "maximum length is -1"),
    ],
)
def test_sizes_that_cannot_work_are_refused(change: dict, message: str) -> None:
    sizes = {
        "groups": [GroupSpec(name="x", pages=5, window=None)],
        "page_size": 4,
        "max_sequences": 1,
        "max_length": 8,
    }
    with pytest.raises(ConfigError, match=message):
        KVManager(**(sizes | change))
