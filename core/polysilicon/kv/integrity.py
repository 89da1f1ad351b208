"""The KV manager's self-check: every page in one place; locks, tables, queues, names right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from polysilicon.kv.identity import TOKEN_BYTES, block_tokens, page_identity
from polysilicon.kv.radix import Node, RadixTree

if TYPE_CHECKING:
    from polysilicon.kv.manager import KVManager, SequenceKV


def check(manager: KVManager) -> None:
    """Raises AssertionError, which says what is wrong, unless all of `manager` is consistent."""
    tree = manager.tree
    nodes = [node for root in tree.roots.values() for node in _descendants(root)]
    sequences = [sequence for sequence in manager.sequences if sequence is not None]
    _check_shape(tree, nodes)
    _check_locks(tree, nodes, sequences)
    _check_queues(tree, nodes)
    _check_names(tree, nodes)
    _check_rows(manager)
    private = [_private_pages(manager, sequence) for sequence in sequences]
    for group, pool in enumerate(manager.pools):
        places = Counter(pool.free_pages())
        places.update(pool.limbo_pages())
        places.update(node.pages[group] for node in nodes if node.pages[group])
        for pages in private:
            places.update(pages[group])
        for page in range(1, pool.pages):
            assert places[page] == 1, f"group {group}: page {page} is in {places[page]} places"
        assert len(places) == pool.pages - 1, f"group {group}: a page that does not exist is in use"


def _descendants(root: Node) -> Iterator[Node]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node


def _check_shape(tree: RadixTree, nodes: list[Node]) -> None:
    for identity, root in tree.roots.items():
        assert root.parent is None, "a root has a parent"
        assert root.names == (identity,), "a root has lost its name"
        assert root.lock or root.children, "a root that nobody uses is still there"
        assert not any(root.pages), "a root holds pages"
    for node in [*tree.roots.values(), *nodes]:
        assert node.order == sorted(node.children), "a node's sorted keys are not its children's"
        for key, child in node.children.items():
            assert child.parent is node, "a child does not know its parent"
            assert child.key == key, "a child does not know its key"
    for node in nodes:
        size = len(node.key)
        whole = size == tree.page_bytes
        assert size in range(TOKEN_BYTES, tree.page_bytes + 1, TOKEN_BYTES), (
            f"a key has {size} bytes"
        )
        assert whole or not node.children, "a partly filled page has children"
        for group in tree.full_groups:
            assert node.pages[group], f"a node lacks its page of full-attention group {group}"
        if not tree.full_groups and not node.lock:
            assert node.children or any(node.pages), "an unlocked leaf without pages is still there"
        if not whole and not node.lock and not tree.window_groups:
            assert node.parent is not None
            fuller = [
                key for key in node.parent.order if key != node.key and key.startswith(node.key)
            ]
            assert not fuller, "a partial leaf is still there beside a fuller page"


def _check_locks(tree: RadixTree, nodes: list[Node], sequences: list[SequenceKV]) -> None:
    locks: Counter[Node] = Counter()
    window_locks: Counter[tuple[Node, int]] = Counter()
    for sequence in sequences:
        locks[sequence.root] += 1
        locks.update(sequence.nodes)
        parent = sequence.root
        for node in sequence.nodes:
            assert node.parent is parent, "a sequence's path is not a path of the tree"
            assert len(node.key) == tree.page_bytes, "a sequence's path holds a partly filled page"
            parent = node
        for group, _ in tree.window_groups:
            held = sequence.nodes[sequence.window_starts[group] :]
            window_locks.update((node, group) for node in held)
        if sequence.source is not None:
            assert sequence.source.parent is parent, "a copy's source is elsewhere"
            locks[sequence.source] += 1
            window_locks.update((sequence.source, group) for group, _ in tree.window_groups)
    known = {*tree.roots.values(), *nodes}
    assert locks.keys() <= known, "a sequence holds a node that is not in the tree"
    for node in known:
        assert node.lock == locks[node], f"a node has {node.lock} locks and {locks[node]} holders"
        for group in range(len(tree.pools)):
            count, holders = node.window_locks[group], window_locks[node, group]
            assert count == holders, (
                f"group {group}: a page has {count} locks and {holders} holders"
            )
            assert not count or node.pages[group], f"group {group}: a missing page is locked"


def _check_queues(tree: RadixTree, nodes: list[Node]) -> None:
    submitted = tree.steps.submitted
    unlocked = {node for node in nodes if not node.lock}
    assert tree.unlocked.keys() == unlocked, "the queue of unlocked nodes is not that of the tree"
    seen: set[Node] = set()
    fence = 0
    for node in tree.unlocked:
        assert seen.issuperset(node.children.values()), (
            "a parent stands before its child in the queue"
        )
        assert fence <= node.fence <= submitted, "the queue of unlocked nodes is out of order"
        fence = node.fence
        seen.add(node)
    for group in tree.full_groups:
        assert tree.queues[group] is tree.unlocked, f"group {group} has a queue of its own"
    for group, _ in tree.window_groups:
        queue = tree.queues[group]
        expected = {node for node in nodes if node.pages[group] and not node.window_locks[group]}
        assert queue.keys() == expected, (
            f"group {group}: the queue of unlocked pages is not the tree's"
        )
        fence = 0
        for node in queue:
            current = node.window_fences[group]
            assert fence <= current <= submitted, f"group {group}: the queue is out of order"
            fence = current


def _check_names(tree: RadixTree, nodes: list[Node]) -> None:
    block = block_tokens(tree.page_size)
    for node in nodes:
        if node.names is not None:
            assert node.parent is not None, "a node has no parent"
            assert node.parent.names is not None, "a name has no parent"
            name = page_identity(node.parent.names[-1], np.frombuffer(node.key, "<i4"), block=block)
            assert node.names[-1] == name, "a page's name does not follow from its tokens"


def _check_rows(manager: KVManager) -> None:
    limbo = [row for _, row in manager.limbo_rows]
    used = [row for row, sequence in enumerate(manager.sequences) if sequence is not None]
    rows = sorted([*manager.free_rows, *limbo, *used])
    assert rows == list(range(len(manager.sequences))), f"rows are not each in one place: {rows}"
    fences = [fence for fence, _ in manager.limbo_rows]
    assert fences == sorted(fences), "rows in limbo are out of order"
    for row in [*manager.free_rows, *limbo]:
        for table in manager.page_tables:
            assert not table[row].any(), f"row {row} is not in use and holds pages"


def _private_pages(manager: KVManager, sequence: SequenceKV) -> list[list[int]]:
    """Per group the sequence's pages outside the tree; checks its tables against its nodes."""
    row, whole = sequence.row, len(sequence.nodes)
    assert manager.sequences[row] is sequence, f"row {row} has another owner"
    assert not sequence.closed, f"row {row} is still given to a closed sequence"
    assert sequence.capacity % manager.page_size == 0, f"row {row} has room for part of a page"
    used = sequence.capacity // manager.page_size
    private = []
    for group, table in enumerate(manager.page_tables):
        start = sequence.window_starts[group]
        assert not table[row, :start].any(), f"group {group}, row {row}: pages behind the window"
        assert not table[row, used:].any(), f"group {group}, row {row}: pages beyond its length"
        entries: list[int] = table[row, start:used].tolist()
        held = [node.pages[group] for node in sequence.nodes[start:]]
        assert entries[: len(held)] == held, (
            f"group {group}, row {row}: the table is not the path's"
        )
        private.append(entries[len(held) :])
        assert start <= max(whole, used), (
            f"group {group}, row {row}: the window starts past the end"
        )
        assert all(entries), f"group {group}, row {row}: a page is missing"
    return private
