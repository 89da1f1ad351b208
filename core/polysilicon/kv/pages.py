"""The pages of one KV group: which are free, and which must wait for the device first."""

from __future__ import annotations

from array import array

_FREE, _LIMBO, _TAKEN = range(3)


class Steps:
    """Numbers of the last step submitted and the last one ended; they count from 1, in order."""

    __slots__ = ("ended", "submitted")

    def __init__(self) -> None:
        self.submitted = 0
        self.ended = 0


class PagePool:
    """Page ids 1 to `pages - 1`; page 0 is never given out, because padding points to it.

    A page that is given back names its fence: the last submitted step that may still touch it.
    Until that step has ended the page lies in limbo, a queue in the order of the fences. Both the
    free list and the limbo queue run through one preallocated array of links, so that nothing is
    allocated while steps run.
    """

    __slots__ = (
        "_fence",
        "_free_head",
        "_limbo_head",
        "_limbo_tail",
        "_next",
        "_state",
        "_steps",
        "free",
        "limbo",
        "pages",
    )

    def __init__(self, pages: int, steps: Steps) -> None:
        self.pages = pages
        self.free = pages - 1
        self.limbo = 0
        self._steps = steps
        self._next = array("i", range(1, pages + 1))
        self._next[pages - 1] = 0
        self._fence = array("q", bytes(8 * pages))
        self._state = bytearray(pages)
        self._state[0] = _TAKEN
        self._free_head = 1 if pages > 1 else 0
        self._limbo_head = 0
        self._limbo_tail = 0

    def take(self) -> int:
        """A free page; the caller has made sure that there is one."""
        page = self._free_head
        assert page, "no free page"
        self._free_head = self._next[page]
        self._state[page] = _TAKEN
        self.free -= 1
        return page

    def give(self, page: int, fence: int) -> None:
        """Take back `page`, which no step after number `fence` touches."""
        assert page, "page 0 is never given out"
        assert self._state[page] == _TAKEN, f"page {page} is given back twice"
        if fence <= self._steps.ended:
            self._push_free(page)
            return
        self._next[page] = 0
        self._state[page] = _LIMBO
        if self.limbo:
            # An evicted page may bring a fence older than the tail's; waiting a little longer keeps
            # the queue in order.
            fence = max(fence, self._fence[self._limbo_tail])
            self._next[self._limbo_tail] = page
        else:
            self._limbo_head = page
        self._fence[page] = fence
        self._limbo_tail = page
        self.limbo += 1

    def step_ended(self) -> None:
        """Free the pages whose fences the newly ended step has passed."""
        ended = self._steps.ended
        while self.limbo and self._fence[self._limbo_head] <= ended:
            page = self._limbo_head
            self._limbo_head = self._next[page]
            self.limbo -= 1
            self._push_free(page)

    def free_pages(self) -> list[int]:
        """The pages of the free list, checked against the counter and the states."""
        return self._walk(self._free_head, self.free, _FREE, "free list")

    def limbo_pages(self) -> list[int]:
        """The pages in limbo, checked against the counter, the states and the fences' order."""
        pages = self._walk(self._limbo_head if self.limbo else 0, self.limbo, _LIMBO, "limbo")
        fences = [self._fence[page] for page in pages]
        assert fences == sorted(fences), f"limbo is out of order: {fences}"
        assert not fences or fences[0] > self._steps.ended, (
            "limbo holds a page whose step has ended"
        )
        assert not fences or fences[-1] <= self._steps.submitted, "limbo waits for a step to come"
        assert not pages or pages[-1] == self._limbo_tail, "the limbo queue has lost its tail"
        return pages

    def _push_free(self, page: int) -> None:
        self._next[page] = self._free_head
        self._free_head = page
        self._state[page] = _FREE
        self.free += 1

    def _walk(self, page: int, count: int, state: int, name: str) -> list[int]:
        found: list[int] = []
        while page:
            assert 0 < page < self.pages, f"{name} holds page {page} of {self.pages}"
            assert len(found) < count, f"{name} is longer than its counter, {count}"
            assert self._state[page] == state, (
                f"page {page} of the {name} is in state {self._state[page]}"
            )
            found.append(page)
            page = self._next[page]
        assert len(found) == count, f"{name} holds {len(found)} pages, its counter says {count}"
        assert self._state.count(state) == count, f"pages outside the {name} have its state"
        return found
