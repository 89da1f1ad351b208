from __future__ import annotations

import pytest

from polysilicon.kv.pages import PagePool, Steps


def test_every_page_but_the_first_is_given_out_once() -> None:
    pool = PagePool(5, Steps())
    assert sorted(pool.take() for _ in range(4)) == [1, 2, 3, 4]
    assert pool.free == 0
    with pytest.raises(AssertionError, match="no free page"):
        pool.take()


def test_a_page_waits_for_its_fence() -> None:
    steps = Steps()
    pool = PagePool(4, steps)
    one, two, three = pool.take(), pool.take(), pool.take()
    steps.submitted = 2
    pool.give(one, 0)
    pool.give(two, 1)
    pool.give(three, 2)
    assert (pool.free, pool.limbo, pool.free_pages(), pool.limbo_pages()) == (
        1,
        2,
        [one],
        [two, three],
    )
    steps.ended = 1
    pool.step_ended()
    assert (set(pool.free_pages()), pool.limbo_pages()) == ({one, two}, [three])
    steps.ended = 2
    pool.step_ended()
    assert (pool.free, pool.limbo, pool.limbo_pages()) == (3, 0, [])


def test_an_older_fence_queues_behind_a_newer_one() -> None:
    steps = Steps()
    pool = PagePool(3, steps)
    one, two = pool.take(), pool.take()
    steps.submitted = 3
    pool.give(one, 3)
    pool.give(two, 2)
    assert pool.limbo_pages() == [one, two]
    steps.ended = 2
    pool.step_ended()
    assert pool.limbo_pages() == [one, two]
    steps.ended = 3
    pool.step_ended()
    assert sorted(pool.free_pages()) == [1, 2]


@pytest.mark.parametrize("limbo", [False, True])
def test_a_page_given_back_twice_is_caught(limbo: bool) -> None:
    steps = Steps()
    pool = PagePool(3, steps)
    page = pool.take()
    steps.submitted = int(limbo)
    pool.give(page, steps.submitted)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(page, steps.submitted)


def test_page_zero_cannot_be_given_back() -> None:
    pool = PagePool(3, Steps())
    with pytest.raises(AssertionError, match="page 0"):
        pool.give(0, 0)
