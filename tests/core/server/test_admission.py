"""Admission control counts what waits, in sequences and in KV pages."""

from __future__ import annotations

import pytest

from polysilicon.config import Config
from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.stats import EngineStats
from polysilicon.errors import Overloaded
from polysilicon.request import Request, SamplingParams
from polysilicon.server.admission import Admission

FACTS = ModelFacts(
    max_length=1024,
    vocab_size=100,
    page_size=16,
    kv_pages=100,
    max_sequences=4,
    eos_ids=frozenset(),
)
IDLE = EngineStats()


def admission(**values: object) -> Admission:
    return Admission(Config.model_validate(values))


def request(name: str, prompt: int = 1, **params: object) -> Request:
    return Request(id=name, prompt=(5,) * prompt, params=SamplingParams(**params))


@pytest.mark.parametrize(
    ("stats", "sequences", "room"),
    [
        (IDLE, 5, True),
        (IDLE, 6, False),
        # A grammar that is being compiled does not mean that there is no room.
        (EngineStats(running=1, waiting={"grammar": 1}), 5, True),
        # Two run, and what waits shows that there are no pages for more.
        (EngineStats(running=2, waiting={"capacity": 1}), 3, True),
        (EngineStats(running=2, waiting={"capacity": 1}), 4, False),
    ],
)
def test_so_many_sequences_may_wait(stats: EngineStats, sequences: int, room: bool) -> None:
    control = admission(max_waiting=2)
    if room:
        control.check(request("a", n=100), sequences=sequences, facts=FACTS, stats=stats)
        return
    with pytest.raises(Overloaded, match="2 sequences wait"):
        control.check(request("a"), sequences=sequences, facts=FACTS, stats=stats)


def fits(control: Admission, asked: Request) -> bool:
    try:
        control.check(asked, sequences=0, facts=FACTS, stats=IDLE)
    except Overloaded:
        return False
    return True


def test_what_waits_may_need_so_many_pages() -> None:
    control = admission(max_waiting_kv=1.0)
    large = request("large", 1000, n=8, max_tokens=24)
    # It needs 1000 + 8 * 24 tokens, which are 75 pages.
    assert fits(control, large)
    control.entered(large, FACTS)
    assert fits(control, request("small", 376, max_tokens=24))
    assert not fits(control, request("larger", 377, max_tokens=24))
    control.started(large)
    assert fits(control, request("larger", 377, max_tokens=24))
    # Alone, even what is larger than all of it.
    assert fits(control, request("largest", 1000, n=128, max_tokens=24))


def test_answers_without_a_bound_count_as_long_as_others_were() -> None:
    control = admission(max_waiting_kv=1.0)
    control.entered(request("waiting", 1600 - 16 - 512, max_tokens=0), FACTS)
    unbounded = request("unbounded", 16, max_tokens=None)
    assert fits(control, unbounded)
    for index in range(100):
        control.ended(request(str(index), n=2), 2 * 600)
    assert not fits(control, unbounded)
    for index in range(100):
        control.ended(request(str(index), n=2), 2 * 100)
    assert fits(control, unbounded)


def test_the_time_to_wait_follows_from_how_fast_requests_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    control = admission(max_waiting=20)

    def retry_after(sequences: int) -> float:
        with pytest.raises(Overloaded) as caught:
            control.check(request("a"), sequences=sequences, facts=FACTS, stats=IDLE)
        assert caught.value.retry_after is not None
        return caught.value.retry_after

    assert retry_after(40) == 1
    for index in range(10):
        control.ended(request(str(index)), 10)
        now[0] += 1
    # One a second, and half of 41 - 4 are to go before.
    assert retry_after(40) == pytest.approx(18.5)
    assert retry_after(4000) == 60
    now[0] += 90
    assert retry_after(24) == 60
