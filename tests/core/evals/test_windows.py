"""Windows hold what their conventions say, and refuse what cannot be scored."""

from __future__ import annotations

import numpy as np
import pytest

from polysilicon.errors import ConfigError
from polysilicon.evals.windows import Cut, beginning_of_text
from polysilicon.tokenizer import Tokenizer

TEXT = list(range(100, 100 + 61))


def guide(length: int, context: int, stride: int) -> list[tuple[int, int]]:
    """(token, tokens before it that its window holds) of what the guide's loop scores."""
    scored = []
    previous = 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        target = end - previous
        # The labels are shifted by one, so that a window's first token is never scored.
        for token in range(max(end - target, begin + 1), end):
            scored.append((token, token - begin))
        previous = end
        if end == length:
            break
    return scored


@pytest.mark.parametrize("length", [2, 3, 15, 16, 17, 31, 32, 33, 61])
@pytest.mark.parametrize(
    ("context", "stride"), [(16, 1), (16, 7), (16, 15), (16, 16), (5, 3), (64, 32)]
)
def test_sliding_windows_are_those_of_the_guide(length, context, stride):
    text = TEXT[:length]
    found = []
    for window in Cut(context=context, stride=stride).windows(text, []):
        start = window.tokens[0] - text[0]
        assert list(window.tokens) == text[start : start + len(window.tokens)]
        assert len(window.tokens) <= context
        found += [(token - text[0], token - text[0] - start) for token in window.scored]
    assert found == guide(length, context, stride)


@pytest.mark.parametrize("length", [1, 2, 13, 14, 15, 61])
@pytest.mark.parametrize("beginning", [[7], [7, 8]])
def test_a_beginning_stands_before_every_window(length, beginning):
    text = TEXT[:length]
    windows = list(Cut(context=16, stride=6).windows(text, beginning))
    assert [token for window in windows for token in window.scored] == text
    for window in windows:
        assert list(window.tokens[: len(beginning)]) == beginning
        assert len(window.tokens) <= 16
        start = window.tokens[len(beginning)] - text[0]
        assert start % 6 == 0


def test_a_token_has_half_a_context_before_it_by_default():
    windows = list(Cut(context=16).windows(TEXT, []))
    assert [window.first for window in windows] == [1, *[8] * (len(windows) - 1)]


@pytest.mark.parametrize("context", [4, 5, 16, 17, 30, 61])
@pytest.mark.parametrize("beginning", [[], [7]])
def test_halves_are_those_of_llama_cpp(context, beginning):
    tokens = np.array([*beginning, *TEXT])
    chunks = len(tokens) // context
    expected = []
    for chunk in range(chunks):
        part = tokens[chunk * context : (chunk + 1) * context].copy()
        if beginning:
            part[0] = beginning[0]
        # Logits from position context / 2 on, of which the last predicts nothing in the window.
        first = context // 2
        expected.append((tuple(part), tuple(part[first + 1 : first + 1 + context - 1 - first])))
    windows = Cut(convention="llamacpp", context=context).windows(TEXT, beginning)
    assert [(window.tokens, window.scored) for window in windows] == expected


@pytest.mark.parametrize(
    ("settings", "text", "beginning", "message"),
    [
        ({"context": 3}, TEXT, [], "--context must be at least 4, not 3"),
        ({"stride": 0}, TEXT, [], "--stride must lie between 1 and --context 512, not 0"),
        ({"stride": 513}, TEXT, [], "--stride must lie between"),
        ({"stride": 8, "convention": "llamacpp"}, TEXT, [], "--convention huggingface"),
        ({"context": 16, "stride": 16}, TEXT, [7], "at most 15"),
        ({}, [], [], "0 token"),
        ({}, [], [7], "0 token"),
        ({}, [5], [], "1 token"),
        ({"convention": "llamacpp", "context": 64}, TEXT, [], "lower --context"),
    ],
)
def test_what_cannot_be_scored_is_refused(settings, text, beginning, message):
    with pytest.raises(ConfigError, match=message):
        list(Cut(**settings).windows(text, beginning))


def test_what_begins_a_text_is_known(tiny, with_bos):
    assert beginning_of_text(Tokenizer.from_directory(tiny)) == ()
    assert beginning_of_text(Tokenizer.from_directory(with_bos)) == (1,)
