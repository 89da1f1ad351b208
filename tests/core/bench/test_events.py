"""Reading event streams."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polysilicon.bench import events
from polysilicon.bench.events import (
    EventParser,
    MalformedStream,
    decode,
    error_message,
    error_text,
)

STREAM = (
    b'data: {"a": 1}\n\n: comment\n\nevent: x\r\nid: 3\r\ndata:[1,\r\ndata: 2]\r\n\r\n\ndata: \n\n'
)
DATA = [b'{"a": 1}', b"[1,\n2]", b""]


@given(st.lists(st.integers(0, len(STREAM))))
def test_data_does_not_depend_on_how_bytes_arrive(cuts):
    parser = EventParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    found = []
    for start, stop in itertools.pairwise(edges):
        found += parser.feed(STREAM[start:stop])
    assert found == DATA


@given(st.lists(st.binary(max_size=30)))
def test_any_bytes_are_read_without_trouble(chunks):
    parser = EventParser()
    for chunk in chunks:
        for data in parser.feed(chunk):
            assert b"data:" in b"".join(chunks)
            assert isinstance(data, bytes)


@pytest.mark.parametrize("flood", [b"x" * 100, b"data: " + b"x" * 100, b"data: 1234567\n" * 20])
def test_an_event_without_end_is_refused(monkeypatch, flood):
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 64)
    with pytest.raises(MalformedStream, match="longer"):
        EventParser().feed(flood)


@pytest.mark.parametrize(
    ("choice", "brings"),
    [
        ({"text": "a"}, True),
        ({"text": "a", "finish_reason": "length"}, True),
        ({"text": ""}, True),
        ({"text": "", "finish_reason": "stop"}, False),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"role": "assistant"}}, False),
        ({"delta": {"role": "assistant", "content": "a"}}, True),
        ({"delta": {"content": "a"}, "finish_reason": None}, True),
        ({"delta": {"content": ""}}, True),
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"delta": {"content": None}, "finish_reason": "stop"}, False),
    ],
)
def test_which_events_bring_tokens(choice, brings):
    (read,) = decode(json.dumps({"choices": [choice], "other": [1]}).encode()).choices
    assert read.brings_tokens is brings


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"choices": {}}', b'{"usage": 3}'])
def test_events_that_are_no_completions_are_refused(data):
    with pytest.raises(MalformedStream):
        decode(data)


def test_usage_and_errors_are_read():
    chunk = decode(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}, "error": null}')
    assert chunk.usage is not None
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (3, 4)
    assert chunk.error is None
    assert decode(b'{"usage": null, "error": "x"}').error == "x"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"error": {"message": "full", "code": 3}}, "full"),
        ({"error": "full"}, "full"),
        ({"detail": [{"msg": "bad"}]}, "[{'msg': 'bad'}]"),
        ({"message": "two\nlines"}, "two lines"),
        ({}, "no message"),
        ("", "no message"),
    ],
)
def test_words_of_errors(said, words):
    assert error_message(said) == words
    assert error_text(json.dumps(said).encode()) == words


def test_words_of_errors_that_are_no_json():
    assert error_text(b"<html>\n502") == "<html> 502"
    assert error_text(b"") == "no message"
    assert len(error_text(b"x" * 10_000)) == 300
