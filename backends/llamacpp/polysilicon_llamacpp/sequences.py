"""The core's pages as sequences of llama.cpp's unified KV cache.

A cell of that cache holds one token's keys and values of all layers, its position and the set of
sequences that it belongs to; a token sees the cells of its own sequence. Copying a range of one
sequence to another only adds to these sets, and a cell is free when its set is empty.

Every row of the core's page tables is a sequence, in which the tokens run; and every page is one
too, its keeper, which holds the cells that the page stands for as long as it stands for them. So a
page that only the prefix cache has lives in its keeper, and a row that comes to share it copies it
from there. What a page held is removed, from its keeper and all rows, when the page is filled anew:
as no page holds more than its size, there is always a cell for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_SEQUENCES = 256
"""llama.cpp's bound on sequences, of a context and as a compiled constant."""


class Cells(Protocol):
    """llama.cpp's memory. Positions `[start, stop)`; stop -1 is without end."""

    def copy(self, source: int, target: int, start: int, stop: int) -> None: ...

    def remove(self, sequence: int, start: int, stop: int) -> None: ...


class PageSequences:
    """Keeps `cells` in the order that a step needs: `copy` and `read` first, for all its rows, then
    `claim` for all, and after the step `written` for all.

    rows: sequences that may run at once. pages: page 0, which is never used, included.
    """

    def __init__(self, cells: Cells, *, rows: int, pages: int, page_size: int) -> None:
        assert rows + pages - 1 <= MAX_SEQUENCES
        self.cells = cells
        self.page_size = page_size
        self._first_keeper = rows - 1
        self._tables: list[list[int]] = [[] for _ in range(rows)]
        self._places = [0] * pages
        self._readers: list[set[int]] = [set() for _ in range(pages)]

    def copy(self, source: int, target: int, count: int) -> None:
        """Give the first `count` tokens of page `source` to page `target` as well."""
        self._forget(target)
        place = self._places[target] = self._places[source]
        start = place * self.page_size
        self.cells.copy(self._keeper(source), self._keeper(target), start, start + count)

    def read(self, row: int, table: Sequence[int], length: int) -> None:
        """Let row hold the first `length` tokens of the pages in `table`, and nothing behind."""
        size = self.page_size
        needed = -(-length // size)
        held = self._tables[row]
        same = 0
        while same < min(needed, len(held)) and held[same] == table[same]:
            same += 1
        if same < len(held):
            self.cells.remove(row, same * size, -1)
            for page in held[same:]:
                self._readers[page].discard(row)
            del held[same:]
        for place in range(same, needed):
            page = table[place]
            assert self._places[page] == place, f"page {page} does not hold page {place}"
            start = place * size
            self.cells.copy(self._keeper(page), row, start, min(start + size, length))
            self._readers[page].add(row)
            held.append(page)

    def claim(self, table: Sequence[int], start: int, stop: int) -> None:
        """Make room for tokens `[start, stop)` in the pages of `table`."""
        for place in range(-(-start // self.page_size), -(-stop // self.page_size)):
            self._forget(table[place])
            self._places[table[place]] = place

    def written(self, row: int, table: Sequence[int], start: int, stop: int) -> None:
        """The step has put tokens `[start, stop)` into row: keep them for their pages."""
        size = self.page_size
        held = self._tables[row]
        for place in range(start // size, -(-stop // size)):
            page = table[place]
            first, last = max(start, place * size), min(stop, (place + 1) * size)
            self.cells.copy(row, self._keeper(page), first, last)
            if place == len(held):
                held.append(page)
                self._readers[page].add(row)

    def _keeper(self, page: int) -> int:
        assert page, "page 0 holds nothing"
        return self._first_keeper + page

    def _forget(self, page: int) -> None:
        place = self._places[page]
        start, stop = place * self.page_size, (place + 1) * self.page_size
        self.cells.remove(self._keeper(page), start, stop)
        for row in self._readers[page]:
            # The row has ended, or reads the same tokens from another page by now.
            self.cells.remove(row, start, stop)
            self._tables[row][place] = 0
        self._readers[page].clear()
