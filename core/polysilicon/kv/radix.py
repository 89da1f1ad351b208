"""The prefix cache: a radix tree over tokens whose nodes hold pages.

A node stands for one page of tokens after its parent's and holds one page id per KV group, 0 where
it has none. A partly filled page is a leaf with a shorter key. Namespaces (model, adapter, salt)
have separate roots, and a lookup never leaves the root it started from.

Who keeps what:
- A sequence locks every node of its path, which keeps the nodes and their full-attention pages, and
  the pages of a sliding-window group only as far back as its window reaches.
- Where the model has full-attention groups every node holds their pages, and an unlocked leaf is
  evicted whole. A sliding-window page can be evicted on its own from any node that nobody locks for
  that group.
- A node that is unlocked, without children and without pages is of no use and leaves the tree.

Least recently used is an order, not a clock: a node enters the end of its queue when its last lock
goes. Paths are unlocked from the leaf to the root and a child is never locked without its parent,
so that children always stand before their parents and the front of the queue is always a leaf.
`unlocked` is the queue of the nodes, which is that of every full-attention group; each
sliding-window group has one of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from polysilicon.kv.identity import TOKEN_BYTES, block_names, block_tokens
from polysilicon.kv.pages import PagePool, Steps


class Node:
    """One page of tokens in its place behind its parent.

    `key` is the page's tokens as bytes; `order` the children's keys, sorted; `fence` the last step
    that may touch the node's pages, valid while unlocked. `window_locks` and `window_fences` say
    the same for each sliding-window group.
    """

    __slots__ = (
        "children",
        "fence",
        "key",
        "lock",
        "names",
        "order",
        "pages",
        "parent",
        "window_fences",
        "window_locks",
    )

    def __init__(self, parent: Node | None, key: bytes, pages: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []
        self.lock = 0
        self.fence = 0
        self.window_locks = [0] * len(pages)
        self.window_fences = [0] * len(pages)
        self.names: tuple[bytes, ...] | None = None


class RadixTree:
    """All cached pages; `windows[g]` is group g's window in tokens, None for full attention."""

    def __init__(
        self,
        *,
        page_size: int,
        windows: Sequence[int | None],
        pools: Sequence[PagePool],
        steps: Steps,
    ) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.pools = pools
        self.roots: dict[bytes, Node] = {}
        self.full_groups = [group for group, window in enumerate(windows) if window is None]
        self.window_groups = [
            (group, window) for group, window in enumerate(windows) if window is not None
        ]
        self.unlocked: OrderedDict[Node, None] = OrderedDict()
        self.queues: list[OrderedDict[Node, None]] = [
            self.unlocked if window is None else OrderedDict() for window in windows
        ]
        self.steps = steps

    # Lookup

    def match(
        self, root: Node, data: bytes, *, partial: bool = True
    ) -> tuple[list[Node], Node | None, int]:
        """The longest usable prefix of `data` (token bytes), at least its last token left out.

        Returns the whole pages' nodes from the root on and, with `partial`, a node whose page
        begins with the tokens that follow, and the number of those (None and 0 where there is
        none). Every sliding-window group has its pages as far back as the first query after that
        prefix looks.
        """
        limit = len(data) - TOKEN_BYTES
        path: list[Node] = []
        children = root.children
        for start in range(0, limit - self.page_bytes + 1, self.page_bytes):
            node = children.get(data[start : start + self.page_bytes])
            if node is None:
                break
            path.append(node)
            children = node.children
        while True:
            source, shared = None, 0
            if partial:
                parent = path[-1] if path else root
                source, shared = self._match_inside(parent, data[: max(limit, 0)], len(path))
            # A longer prefix looks back less far, so a partial page may save a path that is short
            # of a page.
            usable = self._usable_pages(path, shared)
            if usable == len(path):
                return path, source, shared
            del path[usable:]

    def _match_inside(self, parent: Node, data: bytes, page: int) -> tuple[Node | None, int]:
        """The child of `parent` sharing the most tokens with page number `page` of `data`."""
        wanted = data[page * self.page_bytes : (page + 1) * self.page_bytes]
        if not wanted or not parent.order:
            return None, 0
        # Among sorted keys the longest common prefix is that of a neighbour.
        position = bisect_left(parent.order, wanted)
        best: Node | None = None
        best_shared = 0
        for key in parent.order[max(position - 1, 0) : position + 2]:
            shared = _common_tokens(wanted, key)
            node = parent.children[key]
            if shared > best_shared and all(node.pages[group] for group, _ in self.window_groups):
                best, best_shared = node, shared
        return best, best_shared

    def _usable_pages(self, path: list[Node], shared: int) -> int:
        """How many nodes of `path` a hit can use, `shared` tokens of one more page following."""
        if not self.window_groups or not path:
            return len(path)
        lengths = np.arange(len(path) + 1) * self.page_size
        lengths[-1] += shared
        usable = np.ones(len(path) + 1, dtype=bool)
        for group, window in self.window_groups:
            missing = [-1]
            last = -1
            for index, node in enumerate(path):
                if not node.pages[group]:
                    last = index
                missing.append(last)
            usable &= np.array(missing) < np.maximum(lengths - window + 1, 0) // self.page_size
        # Length 0 needs nothing behind it and is always usable.
        return int(np.flatnonzero(usable | (lengths == 0))[-1])

    def names(self, node: Node) -> tuple[bytes, ...]:
        """The names of the node's blocks (`kv.identity`); the last is the page's own."""
        pending = []
        current = node
        while current.names is None:
            pending.append(current)
            assert current.parent is not None, "a root is named when it is made"
            current = current.parent
        parent = current.names[-1]
        for current in reversed(pending):
            current.names = block_names(parent, current.key, block_tokens(self.page_size))
            parent = current.names[-1]
        assert node.names is not None
        return node.names

    # Locks

    def lock_root(self, identity: bytes) -> Node:
        """The root of a namespace, made when it is new, with one more lock."""
        root = self.roots.get(identity)
        if root is None:
            root = self.roots[identity] = Node(None, b"", [0] * len(self.pools))
            root.names = (identity,)
        root.lock += 1
        return root

    def unlock_root(self, root: Node) -> None:
        root.lock -= 1
        self._forget_root(root)

    def lock(self, node: Node) -> None:
        if node.lock == 0:
            del self.unlocked[node]
        node.lock += 1

    def unlock(self, node: Node) -> None:
        """Take one lock off; after the last the node is evictable, or goes when it is of no use."""
        node.lock -= 1
        if node.lock:
            return
        node.fence = self.steps.submitted
        self.unlocked[node] = None
        if self._is_empty(node) or self._is_covered(node):
            self.remove(node)

    def lock_window(self, node: Node, group: int) -> None:
        if node.window_locks[group] == 0:
            del self.queues[group][node]
        node.window_locks[group] += 1

    def unlock_window(self, node: Node, group: int) -> None:
        node.window_locks[group] -= 1
        if node.window_locks[group] == 0:
            node.window_fences[group] = self.steps.submitted
            self.queues[group][node] = None

    def lock_pages(self, node: Node) -> None:
        """Lock a node that has a page in every group, and all those pages."""
        self.lock(node)
        for group, _ in self.window_groups:
            self.lock_window(node, group)

    def unlock_pages(self, node: Node) -> None:
        for group, _ in self.window_groups:
            self.unlock_window(node, group)
        self.unlock(node)

    # Growth

    def insert(self, parent: Node, key: bytes, pages: Sequence[int]) -> Node:
        """The child of `parent` with `key`, locked with all its pages; takes over `pages`.

        `pages` has one of each group. Where the tree already holds such a page the given one goes
        back to its pool, behind the steps submitted so far. The caller holds a lock on `parent`.
        """
        node = parent.children.get(key)
        if node is None:
            node = Node(parent, key, list(pages))
            parent.children[key] = node
            insort(parent.order, key)
            node.lock = 1
            for group, _ in self.window_groups:
                node.window_locks[group] = 1
        else:
            self.lock(node)
            for group, page in enumerate(pages):
                if node.pages[group]:
                    self.pools[group].give(page, self.steps.submitted)
                else:
                    node.pages[group] = page
                    self.queues[group][node] = None
            for group, _ in self.window_groups:
                self.lock_window(node, group)
        self._drop_covered(parent, key)
        return node

    def _drop_covered(self, parent: Node, key: bytes) -> None:
        position = bisect_left(parent.order, key)
        if position and key.startswith(parent.order[position - 1]):
            partial = parent.children[parent.order[position - 1]]
            if partial.lock == 0 and self._is_covered(partial):
                self.remove(partial)

    def _is_covered(self, node: Node) -> bool:
        """Whether a partial leaf's next sibling begins with its tokens and has the same pages."""
        if len(node.key) == self.page_bytes or node.parent is None:
            return False
        order = node.parent.order
        position = bisect_left(order, node.key) + 1
        if position == len(order) or not order[position].startswith(node.key):
            return False
        fuller = node.parent.children[order[position]]
        return all(theirs or not own for own, theirs in zip(node.pages, fuller.pages, strict=True))

    def _is_empty(self, node: Node) -> bool:
        return not self.full_groups and not node.children and not any(node.pages)

    # Eviction

    def evictable(self, group: int) -> int:
        """Cached pages of a group that nobody holds."""
        return len(self.queues[group])

    def awaits_step(self, group: int) -> bool:
        """Whether a page that nobody holds any more may still be touched by a step in flight."""
        newest = next(reversed(self.queues[group]), None)
        if newest is None:
            return False
        full = group in self.full_groups
        return (newest.fence if full else newest.window_fences[group]) > self.steps.ended

    def make_room(self, count: int) -> bool:
        """Evict until every pool has `count` free pages; evict nothing where that cannot be now."""
        ended = self.steps.ended
        leaves: list[Node] = []
        short = max((count - self.pools[group].free for group in self.full_groups), default=0)
        if short > 0:
            leaves = list(islice(self.unlocked, short))
            # Queues are in the order of their fences: when the last has passed, all have.
            if len(leaves) < short or leaves[-1].fence > ended:
                return False
        going = set(leaves)
        holes: list[tuple[int, list[Node]]] = []
        for group, _ in self.window_groups:
            short = count - self.pools[group].free - sum(1 for node in leaves if node.pages[group])
            if short > 0:
                others = (node for node in self.queues[group] if node not in going)
                nodes = list(islice(others, short))
                if len(nodes) < short or nodes[-1].window_fences[group] > ended:
                    return False
                holes.append((group, nodes))
        for node in leaves:
            self.remove(node)
        for group, nodes in holes:
            for node in nodes:
                self.remove_window_page(node, group)
        return True

    def remove_window_page(self, node: Node, group: int) -> None:
        """Evict one unlocked sliding-window page, and the node when that was all it was for."""
        del self.queues[group][node]
        self.pools[group].give(node.pages[group], node.window_fences[group])
        node.pages[group] = 0
        if node.lock == 0 and self._is_empty(node):
            self.remove(node)

    def remove(self, node: Node) -> None:
        """Take out an unlocked leaf, and parents that become useless; give back their pages."""
        current: Node | None = node
        while current is not None:
            assert not current.lock, "a locked node is removed"
            assert not current.children, "a node is removed before its children"
            parent = current.parent
            assert parent is not None, "a root has no pages to give back"
            del self.unlocked[current]
            for group, page in enumerate(current.pages):
                if page:
                    self.queues[group].pop(current, None)
                    self.pools[group].give(page, current.fence)
            del parent.children[current.key]
            del parent.order[bisect_left(parent.order, current.key)]
            current.parent = None
            if parent.parent is None:
                self._forget_root(parent)
                return
            current = parent if parent.lock == 0 and self._is_empty(parent) else None

    def clear(self) -> None:
        """Drop every cached page that nobody holds."""
        while self.unlocked:
            self.remove(next(iter(self.unlocked)))
        for group, _ in self.window_groups:
            while self.queues[group]:
                self.remove_window_page(next(iter(self.queues[group])), group)

    def _forget_root(self, root: Node) -> None:
        if root.lock == 0 and not root.children:
            assert root.names is not None
            del self.roots[root.names[-1]]


def _common_tokens(left: bytes, right: bytes) -> int:
    """How many whole tokens two keys have in common from their beginning."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES
