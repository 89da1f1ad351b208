"""Messages between the HTTP process and the engine process."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polysilicon.engine import messages
from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.stats import EngineStats
from polysilicon.kv.groups import GroupUsage
from polysilicon.request import (
    SLO,
    FinishReason,
    Grammar,
    Request,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenLogprobs,
)

REQUEST = Request(
    id="é-1",
    prompt=(0, 1, 2**31 - 1),
    params=SamplingParams(
        n=3,
        max_tokens=None,
        seed=2**64 - 1,
        stop=("a", "\n"),
        stop_token_ids=(5,),
        logit_bias={7: -1.5, 8: 100.0},
        bad_words=((1, 2), (3,)),
        allowed_token_ids=(1, 2),
        logprobs=20,
        prompt_logprobs=0,
    ),
    adapter="adapter",
    salt="salt",
    priority=-3,
    slo=SLO(ttft=300.0, tpot=None),
    grammar=Grammar(kind="regex", text="a+"),
    arrival=12.5,
)

OUTPUT = RequestOutput(
    request_id="é-1",
    choice=2,
    ids=(1, 2),
    logprobs=(TokenLogprobs(id=1, logprob=-0.25, top=((1, -0.25), (2, -3.0))),),
    prompt_logprobs=(TokenLogprobs(id=4, logprob=-1.0),),
    next_top=((1, -0.25),),
    num_cached_tokens=16,
    finish_reason=FinishReason.ERROR,
    error="a cause",
    refused=True,
    times=RequestTimes(arrival=1.0, first_scheduled=2.0, num_preemptions=4),
    embedding=(0.5, -0.5),
)

STATS = EngineStats(
    requests=2,
    running=1,
    waiting={"capacity": 1},
    kv=(GroupUsage(name="full", total=9, free=4, cached=2, in_use=2, limbo=1),),
    step_seconds=(0.25, 0.5),
)


def test_a_request_arrives_as_it_was_sent() -> None:
    sent = messages.Add(2**40, msgspec.Raw(messages.encode(REQUEST)))
    received = messages.decode_command(messages.encode(sent))
    assert isinstance(received, messages.Add)
    assert received.number == 2**40
    assert messages.decode_request(received.request) == REQUEST


@pytest.mark.parametrize(
    "command", [messages.Cancel(3), messages.Cancel(3, 1), messages.Check(), messages.End()]
)
def test_commands_arrive_as_they_were_sent(command: messages.Command) -> None:
    assert messages.decode_command(messages.encode(command)) == command


@pytest.mark.parametrize(
    "report",
    [
        messages.Loading(1, 2),
        messages.Ready(
            ModelFacts(
                max_length=64,
                vocab_size=100,
                page_size=16,
                kv_pages=9,
                max_sequences=4,
                eos_ids=frozenset({1, 2}),
                memory={"weights": 2**40},
                notes=("a note",),
            )
        ),
        messages.News(messages.pack_tokens([(1, 0, 7)]), ((1, OUTPUT), (2, OUTPUT)), STATS),
        messages.News(b""),
        messages.Checked(None),
        messages.Checked("wrong"),
        messages.Failed("ModelError", "there is none"),
    ],
    ids=lambda report: type(report).__name__,
)
def test_reports_arrive_as_they_were_sent(report: messages.Report) -> None:
    assert messages.decode_report(messages.encode(report)) == report


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
    )
)
def test_tokens_are_packed_exactly(tokens: list[tuple[int, int, int]]) -> None:
    assert list(messages.unpack_tokens(messages.pack_tokens(tokens))) == tokens


def test_a_broken_array_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        messages.unpack_tokens(b"123")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        messages.encode({"number": 1}),
        messages.encode(["add"]),
        messages.encode(["unknown", 1]),
        messages.encode(["cancel", "one"]),
        messages.encode(["cancel", 1, 2, 3]),
        messages.encode(["loading", 1, 2]),
    ],
)
def test_what_is_no_command_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_command(data)


@given(st.binary(max_size=64))
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    for decode, kinds in (
        (messages.decode_command, messages.Command),
        (messages.decode_report, messages.Report),
    ):
        try:
            message = decode(data)
        except msgspec.MsgspecError:
            continue
        assert isinstance(message, kinds)


def test_only_a_single_token_without_more_is_plain() -> None:
    plain = RequestOutput(request_id="a", choice=0, ids=(4,))
    assert messages.is_plain(plain)
    others = [
        dataclasses.replace(plain, **change)
        for change in (
            {"ids": ()},
            {"ids": (4, 5)},
            {"finish_reason": FinishReason.STOP},
            {"logprobs": (TokenLogprobs(id=4, logprob=0.0),)},
            {"prompt_logprobs": (TokenLogprobs(id=4, logprob=0.0),)},
            {"next_top": ((4, 0.0),)},
            {"times": RequestTimes(arrival=0.0)},
            {"num_cached_tokens": 3},
        )
    ]
    assert not any(messages.is_plain(output) for output in others)
