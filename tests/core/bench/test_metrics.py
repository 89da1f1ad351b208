"""Figures from records, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from polysilicon.bench.metrics import (
    Goodput,
    concurrency,
    details,
    failures,
    parse_goodput,
    summarise,
    tokens_per_second,
)
from polysilicon.bench.records import Failure, Record
from polysilicon.errors import ConfigError


def record(sent, times, tokens, *, prompt=10, failure=None, end=None, counted=True):
    return Record(
        prompt_tokens=prompt,
        due=sent - 0.001,
        sent=sent,
        times=times,
        end=end,
        output_tokens=tokens,
        counted=counted,
        failure=failure,
    )


FIRST = record(100.0, [100.5, 101.0, 101.7], 3)
SECOND = record(100.2, [101.2, 102.2], 5, end=102.6, prompt=30)
SINGLE = record(103.0, [103.1], 1)
LOST = record(100.0, [100.1], 0, failure=Failure(cause="timeout", message="late"))
DIED = record(101.0, [], 0, failure=Failure(cause="HTTP 503", message="full"))
ALL = [FIRST, SECOND, SINGLE, LOST, DIED, LOST]


def test_figures_by_hand():
    figures = summarise(ALL, duration=4.0, goodput=Goodput(ttft=600, tpot=700))
    assert figures["completed"] == 3
    assert figures["failed"] == 3
    assert figures["failures"] == {"timeout": 2, "HTTP 503": 1}
    assert figures["total_input_tokens"] == 50
    assert figures["total_output_tokens"] == 9
    assert figures["request_throughput"] == 3 / 4
    assert figures["output_throughput"] == 9 / 4
    assert figures["total_token_throughput"] == 59 / 4
    # FIRST: 500 ms and 600 ms a token; SECOND: 1,000 ms; SINGLE: 100 ms, and no time per token.
    assert figures["request_goodput"] == 2 / 4
    assert figures["mean_ttft_ms"] == pytest.approx((500 + 1000 + 100) / 3)
    assert figures["median_ttft_ms"] == pytest.approx(500)
    assert figures["std_ttft_ms"] == pytest.approx(np.std([500, 1000, 100]))
    assert figures["p99_ttft_ms"] == pytest.approx(np.percentile([500, 1000, 100], 99))
    assert figures["mean_tpot_ms"] == pytest.approx((600 + 350) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((500 + 700 + 1000) / 3)
    assert figures["mean_e2el_ms"] == pytest.approx((1700 + 2400 + 100) / 3)
    assert figures["max_concurrent_requests"] == 2
    assert figures["max_send_delay_ms"] == pytest.approx(1)
    assert figures["tokens_counted_by"] == "usage"


def test_nothing_completed_is_zero_everywhere():
    for records in ([], [LOST]):
        figures = summarise(records, duration=1.0, goodput=None)
        assert figures["completed"] == figures["mean_ttft_ms"] == figures["p99_itl_ms"] == 0
        assert figures["max_output_tokens_per_s"] == figures["max_concurrent_requests"] == 0
        assert figures["request_goodput"] is None


def test_tokens_of_a_second_and_requests_under_way():
    assert tokens_per_second([FIRST, SECOND]) == pytest.approx([1, 2 + 2.5, 2.5])
    steps = concurrency([FIRST, SECOND])
    assert [count for _, count in steps] == [1, 2, 1, 0]
    assert [at for at, _ in steps] == pytest.approx([0, 0.2, 1.7, 2.6])


def test_counting_by_events_is_told():
    uncounted = record(100.0, [100.5], 1, counted=False)
    assert summarise([FIRST, uncounted], duration=1, goodput=None)["tokens_counted_by"] == "events"


def test_details_have_one_entry_a_request():
    lists = details(ALL)
    assert {name: len(values) for name, values in lists.items()} == dict.fromkeys(lists, 6)
    assert lists["errors"] == ["", "", "", "timeout: late", "HTTP 503: full", "timeout: late"]
    assert lists["itls"][0] == pytest.approx([0.5, 0.7])
    assert lists["start_times"] == pytest.approx([0, 0.2, 3, 0, 1, 0])
    assert lists["ttfts"] == pytest.approx([0.5, 1, 0.1, 0.1, 0, 0.1])


def test_failures_come_most_frequent_first_with_a_message():
    assert list(failures([DIED, LOST, LOST]).items()) == [
        ("timeout", (2, "late")),
        ("HTTP 503", (1, "full")),
    ]


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        (Goodput(), True),
        (Goodput(ttft=500.001), True),
        (Goodput(ttft=499), False),
        (Goodput(tpot=600.001), True),
        (Goodput(tpot=599), False),
        (Goodput(e2el=1700.001), True),
        (Goodput(e2el=1699), False),
        (Goodput(ttft=1000, tpot=1000, e2el=1699), False),
    ],
)
def test_every_bound_must_hold(goodput, good):
    assert goodput.holds(FIRST) is good


def test_one_token_takes_no_time_per_token():
    assert Goodput(tpot=0).holds(SINGLE)


def test_bounds_are_parsed_together_or_apart():
    wanted = Goodput(ttft=300, tpot=50, e2el=5000)
    assert parse_goodput(["ttft:300", "tpot:50", "e2el:5000"]) == wanted
    assert parse_goodput(["ttft:300 tpot:50,e2el:5e3"]) == wanted
    assert parse_goodput([]) is None
    for wrong in ("ttft", "ttft:", "itl:3", "ttft:-1", "ttft:inf", "ttft:300:2"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput([wrong])
