"""Incremental text: whole characters only, stop strings across token borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.detokenizer import IncrementalDetokenizer, StopChecker
from polysilicon.errors import RequestError
from polysilicon.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    metadata: Callable[..., dict[str, Any]] = request.getfixturevalue(request.param)
    return Tokenizer.from_gguf(metadata())


def test_never_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé日😀", add_special=False, parse_special=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert [piece for piece in pieces if piece] == ["a", "é", "日", "😀"]
    assert detokenizer.flush() == ""


def test_invalid_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([ids[b"\xe6"]]) == ""
    assert detokenizer.push([ids[b"a"]]) == "�a"
    assert detokenizer.push([ids[b"\xff"]]) == "�"
    assert detokenizer.push([ids[b"\xf0"], ids[b"\x9f"]]) == ""
    assert detokenizer.flush() == "�"


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.lists(st.integers(0, 280), max_size=4), max_size=10),
    prompt=st.integers(0, 40),
    skip_special=st.booleans(),
)
def test_pieces_join_to_decode(
    tokenizer: Tokenizer, chunks: list[list[int]], prompt: int, skip_special: bool
) -> None:
    ids = [token_id for chunk in chunks for token_id in chunk]
    whole = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
    text = "".join(whole.push(chunk) for chunk in chunks) + whole.flush()
    assert text == tokenizer.decode(ids, skip_special=skip_special)

    before = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
    shown = before.push(ids[:prompt])
    after = IncrementalDetokenizer(tokenizer, skip_special=skip_special, prompt_ids=ids[:prompt])
    continued = "".join(after.push([token_id]) for token_id in ids[prompt:]) + after.flush()
    assert shown + continued == text


def test_the_space_of_a_continuation_stays(sentencepiece: Callable[..., dict[str, Any]]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    prompt = tokenizer.encode("ab", add_special=True, parse_special=False)
    answer = tokenizer.encode("ab", add_special=False, parse_special=False)
    assert IncrementalDetokenizer(tokenizer).push(answer) == "ab"
    assert IncrementalDetokenizer(tokenizer, prompt_ids=prompt).push(answer) == " ab"


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """End and text of the stop that is complete first, the longest of several."""
    ends = [
        (end, stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    return min(ends, key=lambda found: (found[0], -len(found[1])), default=None)


@settings(max_examples=400, deadline=None)
@given(
    chunks=st.lists(st.text("abc", max_size=6), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=6),
    include=st.booleans(),
)
def test_stops_as_in_the_whole_text(chunks: list[str], stops: list[str], include: bool) -> None:
    checker = StopChecker(stops, include=include)
    text = "".join(chunks)
    out = "".join(checker.push(chunk) for chunk in chunks)
    found = first_stop(text, stops)
    if found is None:
        assert checker.matched is None
        assert out + checker.flush() == text
    else:
        end, stop = found
        assert checker.matched == stop
        assert out + checker.flush() == text[: end if include else end - len(stop)]


@given(chunks=st.lists(st.text("ab", max_size=3), max_size=12), stop=st.text("ab", min_size=1))
def test_nothing_is_held_without_need(chunks: list[str], stop: str) -> None:
    checker = StopChecker([stop], include=False)
    out, text = "", ""
    for chunk in chunks:
        text += chunk
        out += checker.push(chunk)
        if checker.matched is not None:
            return
        held = next(n for n in range(len(stop), -1, -1) if text.endswith(stop[:n]))
        assert out == text[: len(text) - held]


def test_a_partial_match_is_released() -> None:
    checker = StopChecker(["</answer>", "###"], include=False)
    assert checker.push("x </ans") == "x "
    assert checker.push("ers>") == "</ansers>"
    assert checker.push("##") == ""
    assert checker.flush() == "##"
    assert checker.push("#") == ""
    assert checker.push("#") == ""
    assert checker.push("#!") == ""
    assert checker.matched == "###"
    assert checker.push("more") == checker.flush() == ""


def test_many_and_long_stops() -> None:
    stops = [f"stop number {index}!" for index in range(2000)] + ["a" * 20_000]
    checker = StopChecker(stops, include=True)
    assert checker.push("a" * 19_999) == ""
    assert checker.push("b") == "a" * 19_999 + "b"
    assert checker.push("stop number 1999! and more") == "stop number 1999!"
    assert checker.matched == "stop number 1999!"


def test_checkers_of_the_same_stops_do_not_see_each_other() -> None:
    first, second = (StopChecker(["abc"], include=False) for _ in range(2))
    assert [first.push("xab"), second.push("cab"), first.push("c"), second.push("x")] == [
        "x", "c", "", "abx",
    ]  # fmt: skip
    assert (first.matched, second.matched) == ("abc", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopChecker(["x", ""], include=False)
