"""The self-check finds deliberate damage of every kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polysilicon.kv import GroupSpec, KVManager, SequenceKV

World = tuple[KVManager, SequenceKV]


@pytest.fixture
def world() -> World:
    """A cached path of two pages and a partial one, two pages in limbo, and a running sequence."""
    kv = KVManager(
        groups=[
            GroupSpec(name="full", pages=20, window=None),
            GroupSpec(name="window", pages=20, window=5),
        ],
        page_size=4,
        max_sequences=3,
        max_length=40,
    )
    for tokens in (list(range(10)), [7] * 4):
        sequence = kv.open(tokens, b"root")
        assert sequence is not None
        assert kv.grow(sequence, len(tokens))
        kv.close(sequence, tokens, len(tokens))
    running = kv.open([*range(8), 20, 21], b"root")
    assert running is not None
    assert kv.grow(running, 15)
    dropped = kv.open([5], b"root")
    assert dropped is not None
    assert kv.grow(dropped, 8)
    kv.step_submitted()
    kv.close(dropped, [5], 0)
    for node in kv.tree.unlocked:
        kv.tree.names(node)
    kv.check_integrity()
    return kv, running


def leak_from_the_free_list(kv: KVManager, running: SequenceKV) -> None:
    kv.pools[0].take()


def miscount_the_free_list(kv: KVManager, running: SequenceKV) -> None:
    kv.pools[0].free += 1


def miscount_the_limbo(kv: KVManager, running: SequenceKV) -> None:
    kv.pools[1].limbo -= 1


def free_a_live_page(kv: KVManager, running: SequenceKV) -> None:
    kv.pools[0].give(int(kv.page_tables[0][running.row, 3]), 0)


def free_a_cached_page(kv: KVManager, running: SequenceKV) -> None:
    kv.pools[1].give(next(iter(kv.tree.unlocked)).pages[1], 0)


def use_page_zero(kv: KVManager, running: SequenceKV) -> None:
    kv.page_tables[0][running.row, 3] = 0


def use_one_page_twice(kv: KVManager, running: SequenceKV) -> None:
    kv.page_tables[0][running.row, 3] = kv.page_tables[0][running.row, 2]


def switch_a_table_to_another_page(kv: KVManager, running: SequenceKV) -> None:
    table = kv.page_tables[0][running.row]
    table[0], table[1] = table[1], table[0]


def leave_a_page_behind_the_window(kv: KVManager, running: SequenceKV) -> None:
    kv.page_tables[1][running.row, 0] = kv.pools[1].take()


def leave_a_page_beyond_the_length(kv: KVManager, running: SequenceKV) -> None:
    kv.page_tables[0][running.row, 6] = kv.pools[0].take()


def leave_a_page_in_an_unused_row(kv: KVManager, running: SequenceKV) -> None:
    kv.page_tables[0][2, 0] = kv.pools[0].take()


def drop_a_lock(kv: KVManager, running: SequenceKV) -> None:
    running.nodes[1].lock -= 1


def add_a_lock(kv: KVManager, running: SequenceKV) -> None:
    running.root.lock += 1


def drop_a_window_lock(kv: KVManager, running: SequenceKV) -> None:
    running.nodes[1].window_locks[1] -= 1


def lock_a_missing_page(kv: KVManager, running: SequenceKV) -> None:
    kv.tree.remove_window_page(running.nodes[0], 1)
    running.window_starts[1] = 0
    running.nodes[0].window_locks[1] += 1


def lose_a_node_from_the_queue(kv: KVManager, running: SequenceKV) -> None:
    kv.tree.unlocked.popitem()


def lose_a_page_from_a_window_queue(kv: KVManager, running: SequenceKV) -> None:
    kv.tree.queues[1].popitem()


def queue_a_locked_node(kv: KVManager, running: SequenceKV) -> None:
    kv.tree.unlocked[running.nodes[0]] = None


def put_a_parent_before_its_child(kv: KVManager, running: SequenceKV) -> None:
    kv.close(running, list(range(8)), 8)
    kv.tree.unlocked.move_to_end(running.root.children[next(iter(running.root.children))], False)


def set_a_fence_to_come(kv: KVManager, running: SequenceKV) -> None:
    next(reversed(kv.tree.unlocked)).fence = 2


def disorder_the_fences_of_a_window(kv: KVManager, running: SequenceKV) -> None:
    next(iter(kv.tree.queues[1])).window_fences[1] = 1


def change_a_key(kv: KVManager, running: SequenceKV) -> None:
    running.nodes[0].key = b"\0" * 16


def cut_a_key(kv: KVManager, running: SequenceKV) -> None:
    node = next(iter(kv.tree.unlocked))
    assert node.parent is not None
    del node.parent.children[node.key]
    node.parent.order.remove(node.key)
    node.key = node.key[:3]
    node.parent.children[node.key] = node
    node.parent.order.append(node.key)
    node.parent.order.sort()


def disorder_the_children(kv: KVManager, running: SequenceKV) -> None:
    running.root.order.reverse()


def orphan_a_node(kv: KVManager, running: SequenceKV) -> None:
    running.nodes[1].parent = running.root


def take_a_path_out_of_the_tree(kv: KVManager, running: SequenceKV) -> None:
    running.nodes.reverse()


def forge_a_name(kv: KVManager, running: SequenceKV) -> None:
    running.nodes[1].names = (b"forged",)


def rename_a_root(kv: KVManager, running: SequenceKV) -> None:
    running.root.names = (b"other tenant",)


def drop_a_full_page(kv: KVManager, running: SequenceKV) -> None:
    node = next(iter(kv.tree.unlocked))
    kv.pools[0].give(node.pages[0], 0)
    node.pages[0] = 0


def keep_an_unused_root(kv: KVManager, running: SequenceKV) -> None:
    kv.tree.lock_root(b"nobody").lock -= 1


def lose_a_row(kv: KVManager, running: SequenceKV) -> None:
    kv.free_rows.pop()


def give_a_row_twice(kv: KVManager, running: SequenceKV) -> None:
    kv.free_rows.append(running.row)


def forget_that_it_is_closed(kv: KVManager, running: SequenceKV) -> None:
    running.closed = True


DAMAGES: list[tuple[Callable[[KVManager, SequenceKV], None], str]] = [
    (leak_from_the_free_list, "is in 0 places"),
    (miscount_the_free_list, "counter says"),
    (miscount_the_limbo, "longer than its counter"),
    (free_a_live_page, "is in 2 places"),
    (free_a_cached_page, "is in 2 places"),
    (use_page_zero, "a page is missing"),
    (use_one_page_twice, "is in [02] places"),
    (switch_a_table_to_another_page, "the table is not the path's"),
    (leave_a_page_behind_the_window, "behind the window"),
    (leave_a_page_beyond_the_length, "beyond its length"),
    (leave_a_page_in_an_unused_row, "not in use and holds pages"),
    (drop_a_lock, "0 locks and 1 holders"),
    (add_a_lock, "2 locks and 1 holders"),
    (drop_a_window_lock, "0 locks and 1 holders"),
    (lock_a_missing_page, "a missing page is locked"),
    (lose_a_node_from_the_queue, "queue of unlocked nodes is not that of the tree"),
    (lose_a_page_from_a_window_queue, "queue of unlocked pages is not the tree's"),
    (queue_a_locked_node, "queue of unlocked nodes is not that of the tree"),
    (put_a_parent_before_its_child, "a parent stands before its child"),
    (set_a_fence_to_come, "queue of unlocked nodes is out of order"),
    (disorder_the_fences_of_a_window, "queue is out of order"),
    (change_a_key, "does not know its key"),
    (cut_a_key, "a key has 3 bytes"),
    (disorder_the_children, "sorted keys"),
    (orphan_a_node, "does not know its parent"),
    (take_a_path_out_of_the_tree, "not a path of the tree"),
    (forge_a_name, "does not follow from its tokens"),
    (rename_a_root, "lost its name"),
    (drop_a_full_page, "lacks its page of full-attention group 0"),
    (keep_an_unused_root, "a root that nobody uses"),
    (lose_a_row, "rows are not each in one place"),
    (give_a_row_twice, "rows are not each in one place"),
    (forget_that_it_is_closed, "still given to a closed sequence"),
]


@pytest.mark.parametrize(
    ("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES]
)
def test_damage_is_found(
    world: World, damage: Callable[[KVManager, SequenceKV], None], message: str
) -> None:
    kv, running = world
    damage(kv, running)
    with pytest.raises(AssertionError, match=message):
        kv.check_integrity()


def test_an_unlocked_leaf_without_pages_is_found() -> None:
    kv = KVManager(
        groups=[GroupSpec(name="window", pages=20, window=5)],
        page_size=4,
        max_sequences=1,
        max_length=40,
    )
    sequence = kv.open([1] * 4, b"root")
    assert sequence is not None
    assert kv.grow(sequence, 4)
    kv.close(sequence, [1] * 4, 4)
    (node,) = kv.tree.unlocked
    kv.pools[0].give(node.pages[0], 0)
    node.pages[0] = 0
    with pytest.raises(AssertionError, match="an unlocked leaf without pages"):
        kv.check_integrity()


def test_a_partial_leaf_beside_a_fuller_page_is_found() -> None:
    kv = KVManager(
        groups=[GroupSpec(name="full", pages=20, window=None)],
        page_size=4,
        max_sequences=1,
        max_length=40,
    )
    sequence = kv.open([1] * 4, b"root")
    assert sequence is not None
    assert kv.grow(sequence, 4)
    kv.close(sequence, [1] * 4, 4)
    (node,) = kv.tree.unlocked
    root = kv.tree.roots[b"root"]
    partial = kv.tree.insert(root, node.key[:8], [kv.pools[0].take()])
    partial.lock = 0
    kv.tree.unlocked[partial] = None
    with pytest.raises(AssertionError, match="beside a fuller page"):
        kv.check_integrity()
