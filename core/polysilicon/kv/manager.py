"""Who holds which KV page: sequences, the prefix cache, the free lists, the steps in flight.

Sequences get rows of page tables and pages as they grow; finished pages enter the radix tree at
once, so that the next sequence with the same beginning finds them. Nothing here touches KV itself:
a page is an id, and the only work asked of a device is the list of slot copies that `open` hands
out.

A third kind of group, recurrent state, would fit beside the two: one fixed block per row from a
pool of its own, and checkpoints of it that hang on tree nodes like the pages of a sliding window
one token wide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from polysilicon.kv.groups import GroupSpec, GroupUsage, check_sizes
from polysilicon.kv.identity import TOKEN_BYTES, Tokens, token_bytes
from polysilicon.kv.integrity import check
from polysilicon.kv.pages import PagePool, Steps
from polysilicon.kv.radix import Node, RadixTree

SlotCopy = tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int32]]


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceKV:
    """What one running sequence holds; read by the scheduler, written by the KV manager.

    row:                the sequence's row in every page table, its own while it runs
    num_cached_tokens:  tokens found in the prefix cache, whose KV need not be computed
    copies:             (group, source slots, destination slots), to be run before the next step is
                        submitted; a slot is page * page_size + offset
    capacity:           tokens that the pages taken so far have room for
    nodes:              the tree's nodes for the sequence's whole committed pages
    """

    row: int
    root: Node
    nodes: list[Node]
    num_cached_tokens: int = 0
    copies: list[SlotCopy] = field(default_factory=list)
    capacity: int = 0
    window_starts: list[int]
    source: Node | None = None
    wake: int = 0
    closed: bool = False


class KVManager:
    """Pages of every KV group for up to `max_sequences` sequences of up to `max_length` tokens.

    page_tables: one int32 array [max_sequences, ceil(max_length / page_size)] per group. Row =
        `SequenceKV.row`; 0 where the sequence has no page, be it not yet or no longer (behind the
        window).
    prefix_queries, prefix_hits: tokens looked up in the prefix cache, and those found there.

    Calls take effect in the order of submission on the device. Step n+1 may be submitted before
    step n has ended: a page or row is handed out again only when every step that may touch it has
    ended (`step_submitted`, `step_ended`).

    Raises ConfigError for sizes that cannot work.
    """

    def __init__(
        self,
        *,
        groups: Sequence[GroupSpec],
        page_size: int,
        max_sequences: int,
        max_length: int,
        prefix_cache: bool = True,
    ) -> None:
        check_sizes(groups, page_size, max_sequences, max_length)
        self.groups = tuple(groups)
        self.page_size = page_size
        self.max_length = max_length
        self.prefix_cache = prefix_cache
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.steps = Steps()
        self.pools = tuple(PagePool(group.pages, self.steps) for group in groups)
        self.tree = RadixTree(
            page_size=page_size,
            windows=[group.window for group in groups],
            pools=self.pools,
            steps=self.steps,
        )
        pages = -(-max_length // page_size)
        self.page_tables = tuple(np.zeros((max_sequences, pages), np.int32) for _ in groups)
        self.sequences: list[SequenceKV | None] = [None] * max_sequences
        self.free_rows = list(range(max_sequences))
        heapify(self.free_rows)
        self.limbo_rows: deque[tuple[int, int]] = deque()
        self._copying: list[SequenceKV] = []

    # A sequence's life

    def open(self, tokens: Tokens, root: bytes, *, reuse: bool = True) -> SequenceKV | None:
        """Start a sequence whose first tokens are known.

        None when no row is free, with nothing changed. Takes the lowest free row. With `reuse` it
        finds and locks the longest usable prefix that the cache of namespace `root`
        (`root_identity`) holds, leaving at least the last token to compute, and enters its pages in
        the tables. A page that is shared only in part is copied: a fresh page is taken in every
        group and `copies` says which slots to copy before the very next step. Copies of a sequence
        that is closed before that step must not be run.
        """
        assert len(tokens) <= self.max_length, (
            f"{len(tokens)} tokens, max_length is {self.max_length}"
        )
        if not self.free_rows:
            return None
        sequence = SequenceKV(
            row=heappop(self.free_rows),
            root=self.tree.lock_root(root),
            nodes=[],
            window_starts=[0] * len(self.groups),
        )
        self.sequences[sequence.row] = sequence
        if reuse and self.prefix_cache:
            self._reuse(sequence, token_bytes(tokens))
            self.prefix_queries += len(tokens)
            self.prefix_hits += sequence.num_cached_tokens
        self._set_wake(sequence)
        return sequence

    def cached_tokens(self, tokens: Tokens, root: bytes) -> int:
        """How many of `tokens` `open` would now find in the cache of namespace `root`, in whole
        pages; nothing is locked."""
        node = self.tree.roots.get(root)
        if node is None or not self.prefix_cache:
            return 0
        return len(self.tree.match(node, token_bytes(tokens), partial=False)[0]) * self.page_size

    def grow(self, sequence: SequenceKV, length: int) -> bool:
        """Make sure of pages for `length` tokens in all, evicting cached pages where need be.

        False where that cannot be now, with nothing changed. More pages may come when steps end:
        those in limbo, and cached ones that a step in flight may still touch.
        """
        if length <= sequence.capacity:
            return True
        assert length <= self.max_length, f"{length} tokens, max_length is {self.max_length}"
        size = self.page_size
        first = sequence.capacity // size
        last = -(-length // size)
        count = last - first
        if not self._has_room(count):
            return False
        row = sequence.row
        if count == 1:
            for pool, table in zip(self.pools, self.page_tables, strict=True):
                table[row, first] = pool.take()
        else:
            for pool, table in zip(self.pools, self.page_tables, strict=True):
                table[row, first:last] = [pool.take() for _ in range(count)]
        sequence.capacity = last * size
        return True

    def commit(self, sequence: SequenceKV, tokens: Tokens, length: int) -> None:
        """Say that `tokens[:length]` are known and the steps computing their KV submitted.

        Whole pages enter the tree; where it already holds such a page, the sequence's table is
        switched to that one and its own is freed. Sliding-window pages that no query from position
        `length` on can see are let go. Of `tokens` only the new pages' part is read. Call it after
        `step_submitted` of the step that computes the tokens, not before.
        """
        if length >= sequence.wake:
            self._commit(sequence, tokens, length)

    def close(self, sequence: SequenceKV, tokens: Tokens, length: int) -> None:
        """End a sequence: finished, cancelled or preempted.

        `tokens[:length]` are known and computed, or submitted, as for `commit`. A partly filled
        last page enters the tree too. All locks go, pages that are not in the tree are freed, and
        so is the row.
        """
        assert not sequence.closed, "a sequence is closed twice"
        tree, nodes, row = self.tree, sequence.nodes, sequence.row
        if sequence.source is not None:
            # Its copies were never run: what they would have filled holds nothing.
            length = min(length, len(nodes) * self.page_size)
            self._copying.remove(sequence)
            self._release_source(sequence)
        self._commit(sequence, tokens, length)
        kept = len(nodes)
        if self.prefix_cache and length > kept * self.page_size:
            key = token_bytes(tokens[kept * self.page_size : length])
            parent = nodes[-1] if nodes else sequence.root
            pages = [int(table[row, kept]) for table in self.page_tables]
            tree.unlock_pages(tree.insert(parent, key, pages))
            kept += 1
        used = sequence.capacity // self.page_size
        for group, (pool, table) in enumerate(zip(self.pools, self.page_tables, strict=True)):
            for page in table[row, max(kept, sequence.window_starts[group]) : used].tolist():
                pool.give(page, self.steps.submitted)
        self._detach(sequence)
        tree.unlock_root(sequence.root)
        sequence.copies = []
        sequence.closed = True
        self.sequences[row] = None
        if self.steps.submitted > self.steps.ended:
            self.limbo_rows.append((self.steps.submitted, row))
        else:
            heappush(self.free_rows, row)

    # Steps

    def step_submitted(self) -> int:
        """Count a step, and the copies run before it, as submitted; returns its number, from 1."""
        self.steps.submitted += 1
        for sequence in self._copying:
            # From here on the fence protects the source: whoever evicts it waits for this step.
            self._release_source(sequence)
            sequence.copies = []
        self._copying.clear()
        return self.steps.submitted

    def step_ended(self, step: int) -> None:
        """Say that a step has ended, in the order of submission; frees what waited for it."""
        steps = self.steps
        assert step == steps.ended + 1 <= steps.submitted, (
            f"step {step} ended; {steps.ended} have ended, {steps.submitted} were submitted"
        )
        steps.ended = step
        for pool in self.pools:
            pool.step_ended()
        while self.limbo_rows and self.limbo_rows[0][0] <= step:
            heappush(self.free_rows, self.limbo_rows.popleft()[1])

    # The whole

    def usage(self) -> tuple[GroupUsage, ...]:
        """Where every group's pages are, in the order of the groups."""
        report = []
        for group, (spec, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            cached = self.tree.evictable(group)
            total = spec.pages - 1
            report.append(
                GroupUsage(
                    name=spec.name,
                    total=total,
                    free=pool.free,
                    cached=cached,
                    in_use=total - pool.free - pool.limbo - cached,
                    limbo=pool.limbo,
                )
            )
        return tuple(report)

    def reclaiming(self) -> bool:
        """Whether steps in flight hold pages back, so that a `grow` that failed may yet succeed.

        Such pages are in limbo, or cached but perhaps still read by one of those steps.
        """
        return any(pool.limbo or self.tree.awaits_step(g) for g, pool in enumerate(self.pools))

    def reset(self) -> None:
        """Drop all cached pages that nobody holds."""
        self.tree.clear()

    def check_integrity(self) -> None:
        """AssertionError, saying what is wrong, unless all is consistent; walks everything."""
        check(self)

    # Inside

    def _reuse(self, sequence: SequenceKV, data: bytes) -> None:
        """Enter the longest cached prefix of `data` (token bytes) into a new sequence."""
        path, source, shared = self.tree.match(sequence.root, data)
        self._attach(sequence, path, shared)
        if source is None:
            return
        if self._copy_page(sequence, source, shared, len(data) // TOKEN_BYTES):
            sequence.num_cached_tokens += shared
        else:
            # Without the partial page the window of the first query may begin a page earlier.
            self._detach(sequence)
            path, _, _ = self.tree.match(sequence.root, data, partial=False)
            self._attach(sequence, path, 0)

    def _attach(self, sequence: SequenceKV, path: list[Node], shared: int) -> None:
        """Lock `path`, which `shared` copied tokens follow, and enter its pages in the tables."""
        tree, size, row = self.tree, self.page_size, sequence.row
        whole = len(path)
        starts = sequence.window_starts
        for group, window in tree.window_groups:
            starts[group] = max(whole * size + shared - window + 1, 0) // size
        for node in path:
            tree.lock(node)
        for group, _ in tree.window_groups:
            for node in path[starts[group] :]:
                tree.lock_window(node, group)
        for group, table in enumerate(self.page_tables):
            table[row, starts[group] : whole] = [
                node.pages[group] for node in path[starts[group] :]
            ]
        sequence.nodes = path
        sequence.capacity = whole * size
        sequence.num_cached_tokens = whole * size

    def _detach(self, sequence: SequenceKV) -> None:
        """Unlock the sequence's path and clear its tables."""
        tree, nodes = self.tree, sequence.nodes
        for table in self.page_tables:
            table[sequence.row, : sequence.capacity // self.page_size] = 0
        for index in range(len(nodes) - 1, -1, -1):
            node = nodes[index]
            for group, _ in tree.window_groups:
                if index >= sequence.window_starts[group]:
                    tree.unlock_window(node, group)
            tree.unlock(node)
        sequence.nodes = []
        sequence.capacity = 0

    def _copy_page(self, sequence: SequenceKV, source: Node, shared: int, length: int) -> bool:
        """Have the first `shared` slots of `source` copied to a fresh page per group.

        False where that cannot be now. Until the copy is submitted its source stays locked. That
        must not be what keeps the rest of the `length` known tokens from finding pages, or a
        sequence alone in a small pool could never start.
        """
        tree, size = self.tree, self.page_size
        whole = len(sequence.nodes)
        needed = -(-length // size) - whole
        for group, pool in enumerate(self.pools):
            counted = source in tree.queues[group]
            if pool.free + pool.limbo + tree.evictable(group) - counted < needed:
                return False
        tree.lock_pages(source)
        if not self._has_room(1):
            tree.unlock_pages(source)
            return False
        offsets = np.arange(shared, dtype=np.int32)
        for group, (pool, table) in enumerate(zip(self.pools, self.page_tables, strict=True)):
            page = pool.take()
            table[sequence.row, whole] = page
            copy = (group, source.pages[group] * size + offsets, page * size + offsets)
            sequence.copies.append(copy)
        sequence.capacity += size
        sequence.source = source
        self._copying.append(sequence)
        return True

    def _release_source(self, sequence: SequenceKV) -> None:
        assert sequence.source is not None, "no copy is pending"
        self.tree.unlock_pages(sequence.source)
        sequence.source = None

    def _has_room(self, count: int) -> bool:
        for pool in self.pools:
            if pool.free < count:
                return self.tree.make_room(count)
        return True

    def _commit(self, sequence: SequenceKV, tokens: Tokens, length: int) -> None:
        assert length <= sequence.capacity, f"{length} tokens in room for {sequence.capacity}"
        tree, size, row, nodes = self.tree, self.page_size, sequence.row, sequence.nodes
        first, last = len(nodes), length // size
        if self.prefix_cache and first < last:
            data = token_bytes(tokens[first * size : last * size])
            owned = zip(
                *(table[row, first:last].tolist() for table in self.page_tables), strict=True
            )
            parent = nodes[-1] if nodes else sequence.root
            for index, pages in enumerate(owned, first):
                start = (index - first) * tree.page_bytes
                parent = tree.insert(parent, data[start : start + tree.page_bytes], pages)
                nodes.append(parent)
                for table, page, kept in zip(self.page_tables, pages, parent.pages, strict=True):
                    if kept != page:
                        table[row, index] = kept
        for group, window in tree.window_groups:
            start, stop = sequence.window_starts[group], max(length - window + 1, 0) // size
            if start < stop:
                self._leave_behind(sequence, group, start, stop)
        self._set_wake(sequence)

    def _leave_behind(self, sequence: SequenceKV, group: int, start: int, stop: int) -> None:
        """Let go of pages `start` to `stop` of a group, which are behind the window."""
        committed = sequence.nodes[start:stop]
        for node in committed:
            self.tree.unlock_window(node, group)
        row = self.page_tables[group][sequence.row]
        for page in row[start + len(committed) : stop].tolist():
            self.pools[group].give(page, self.steps.submitted)
        row[start:stop] = 0
        sequence.window_starts[group] = stop

    def _set_wake(self, sequence: SequenceKV) -> None:
        """Note the length at which `commit` has something to do next."""
        size = self.page_size
        wake = (len(sequence.nodes) + 1) * size if self.prefix_cache else self.max_length + 1
        for group, window in self.tree.window_groups:
            wake = min(wake, (sequence.window_starts[group] + 1) * size + window - 1)
        sequence.wake = wake
