"""Tokenizers from GGUF metadata: both algorithms, special tokens, hostile input."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysilicon.errors import ModelError
from polysilicon.tokenizer import Tokenizer
from polysilicon.tokenizer_pretokenizers import PRE_TOKENIZERS
from polysilicon.tokenizer_sentencepiece import SentencePieceMerger
from polysilicon.tokenizer_vocabulary import BYTE_OF_STAND_IN

Metadata = Callable[..., dict[str, Any]]


def encode(tokenizer: Tokenizer, text: str, *, parse_special: bool = False) -> list[bytes]:
    ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
    return [tokenizer.token_bytes(token_id) for token_id in ids]


def test_byte_level(byte_level: Metadata) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert encode(tokenizer, "hello hello") == [b"hello", b" hello"]
    assert encode(tokenizer, "aaaaa") == [b"aaaa", b"a"]
    assert encode(tokenizer, "é") == [b"\xc3", b"\xa9"]
    assert encode(tokenizer, "") == []


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(byte_level: Metadata, name: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre=name, bos_token_id=256))
    text = "I'll  go\n\n \tto 12345 Köln, 日本語テスト! hello hello \r\n 3.14x́ FooBar  "
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.add_bos == PRE_TOKENIZERS[name].add_bos


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 2024!\n\n x", ["it", "'s", " 2024", "!", "\n\n", " x"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "it'S 12345\n\nx", ["it", "'S", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", " 12(a)", [" ", "1", "2", "(a", ")"]),
        ("deepseek-v3", "ab日本1234", ["ab", "日本", "123", "4"]),
        ("deepseek-llm", "ab  日本12 c", ["ab", "  ", "日本", "12", " c"]),
        ("deepseek-coder", "ab, 12", ["ab", ",", " ", "1", "2"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
        ("gpt-4o", "fooBar's/\n", ["foo", "Bar's", "/\n"]),
        ("falcon", "`a` 1234", ["`", "a", "`", " ", "123", "4"]),
    ],
)
def test_words(byte_level: Metadata, name: str, text: str, words: list[str]) -> None:
    """With every pair of bytes merged, the tokens are the words that the pre-tokenizer cuts."""
    base = byte_level(pre=name)
    stand_in = {byte: character for character, byte in BYTE_OF_STAND_IN.items()}
    tokens, merges = base["tokenizer.ggml.tokens"][:256], []
    for word in words:
        spelled = "".join(stand_in[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    # Joins across the words' borders would be taken if the words were not cut there.
    for left, right in pairwise(words):
        joined = ["".join(stand_in[b] for b in w.encode()) for w in (left, right)]
        if "".join(joined) not in tokens:
            tokens.append("".join(joined))
            merges.append(" ".join(joined))
    tokenizer = Tokenizer.from_gguf(
        byte_level(
            pre=name,
            tokens=tokens,
            merges=merges,
            token_type=[1] * len(tokens),
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    assert encode(tokenizer, text) == [word.encode() for word in words]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_special_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    metadata: Metadata = request.getfixturevalue(kind)
    tokenizer = Tokenizer.from_gguf(metadata())
    control = tokenizer.token_text(tokenizer.eos_id or 0)
    text = f"a<br>{control}b"
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    plain = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.eos_id in parsed
    assert tokenizer.eos_id not in plain
    for ids in (parsed, plain):
        assert tokenizer.token_id("<br>") in ids
        assert tokenizer.decode(ids, skip_special=False).replace(" ", "") == text
    assert tokenizer.decode(parsed).replace(" ", "") == "a<br>b"


def test_the_longest_special_token_wins(byte_level: Metadata) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert encode(tokenizer, "<|im_start|><|im", parse_special=True) == [b"<|im_start|>", b"<|im"]
    assert encode(tokenizer, "<|im_start|>")[0] == b"<|im"
    assert encode(tokenizer, "<<br>") == [b"<", b"<br>"]


def test_sentencepiece(sentencepiece: Metadata) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert encode(tokenizer, "abc ab") == [b" ab", b"c", b" ab"]
    assert encode(tokenizer, "é") == [b" ", b"\xc3", b"\xa9"]
    assert encode(tokenizer, "") == []
    assert tokenizer.encode("", add_special=True, parse_special=False) == [1]
    ids = tokenizer.encode("abc ab", add_special=True, parse_special=False)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == "abc ab"
    assert tokenizer.decode(ids, skip_special=False) == "<s> abc ab"
    assert tokenizer.strip_leading_space


def test_space_prefix_and_extra_spaces(sentencepiece: Metadata) -> None:
    bare = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False))
    assert encode(bare, "ab<br>ab") == [b"ab", b"<br>", b"ab"]
    prefixed = Tokenizer.from_gguf(sentencepiece())
    assert encode(prefixed, "ab<br>ab") == [b" ab", b"<br>", b" ab"]
    collapsing = Tokenizer.from_gguf(sentencepiece(remove_extra_whitespaces=True))
    assert encode(collapsing, "  ab   c ") == [b" ab", b" ", b"c"]


def test_text_never_becomes_a_control_or_byte_token(sentencepiece: Metadata) -> None:
    base = sentencepiece()
    tokens = [*base["tokenizer.ggml.tokens"], "<", "|end|>"]
    types = [*base["tokenizer.ggml.token_type"], 1, 1]
    scores = [*base["tokenizer.ggml.scores"], 0.0, 0.0]
    pieces = Tokenizer.from_gguf(sentencepiece(tokens=tokens, token_type=types, scores=scores))
    ids = pieces.encode("<|end|><0x41>", add_special=False, parse_special=False)
    assert not pieces.special_ids & set(ids)
    assert b"A" not in [pieces.token_bytes(i) for i in ids]


def test_unused_pieces_are_taken_apart(sentencepiece: Metadata) -> None:
    base = sentencepiece(add_space_prefix=False)
    tokens = base["tokenizer.ggml.tokens"]
    types = list(base["tokenizer.ggml.token_type"])
    types[tokens.index("ab")] = 5
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, token_type=types))
    assert encode(tokenizer, "ab ab") == [b"a", b"b", b" ab"]


def test_without_types_and_without_byte_tokens(sentencepiece: Metadata) -> None:
    untyped = Tokenizer.from_gguf(sentencepiece(token_type=None))
    assert encode(untyped, "é") == [b" ", b"\xc3", b"\xa9"]
    small = Tokenizer.from_gguf(
        sentencepiece(tokens=["<unk>", "▁", "a"], token_type=[2, 1, 1], scores=[0, -1, -2],
                      bos_token_id=None, eos_token_id=None)
    )  # fmt: skip
    assert small.encode("aé", add_special=False, parse_special=False) == [1, 2, 0]
    assert (small.bos_id, small.eos_id) == (1, 2)


def test_end_of_turn_markers(byte_level: Metadata) -> None:
    base = byte_level()
    types = list(base["tokenizer.ggml.token_type"])
    im_end = base["tokenizer.ggml.tokens"].index("<|im_end|>")
    types[im_end] = 4
    tokenizer = Tokenizer.from_gguf(
        byte_level(token_type=types, eos_token_id=0, eot_token_id=3, eom_token_id=4)
    )
    assert tokenizer.eos_ids == {0, 3, 4, im_end}
    assert im_end in tokenizer.special_ids


def test_added_ends(byte_level: Metadata) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(add_bos_token=True, add_eos_token=True))
    ids = tokenizer.encode("hello", add_special=True, parse_special=False)
    assert ids[0] == tokenizer.bos_id
    assert ids[-1] == tokenizer.eos_id
    assert (tokenizer.add_bos, tokenizer.add_eos) == (True, True)


def test_named_templates(byte_level: Metadata) -> None:
    metadata = byte_level() | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ("tool_use",),
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert tokenizer.chat_template == "plain"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize(
    "text",
    ["\ud800", "a\udfffb", "\ud83d\ude00", "\x00\x01", "﻿x", "a" * 100_000, " " * 100_000 + "x",
     "\n" * 100_000, "<" * 100_000, "<|im_" * 20_000, "日" * 30_000],
    ids=["high", "low", "pair", "nul", "bom", "a", "spaces", "newlines", "angles", "almost", "cjk"],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_strange_and_long_texts(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    metadata: Metadata = request.getfixturevalue(kind)
    tokenizer = Tokenizer.from_gguf(metadata())
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert tokenizer.decode(ids, skip_special=False) == expected


def merge_slowly(text: str, pieces: dict[str, int], scores: list[float]) -> list[str]:
    """The definition: join the best-scored pair, leftmost of equals, until none is a piece."""
    symbols = list(text)
    while True:
        joins = [
            (-scores[pieces[left + right]], index)
            for index, (left, right) in enumerate(pairwise(symbols))
            if left + right in pieces
        ]
        if not joins:
            return symbols
        _, index = heapq.nsmallest(1, joins)[0]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab▁c", min_size=2, max_size=5), unique=True, max_size=30),
    scores=st.lists(st.integers(-8, 0), min_size=30, max_size=30),
    texts=st.lists(st.text("ab▁c", max_size=30), max_size=8),
)
def test_merging_follows_the_definition(
    pieces: list[str], scores: list[int], texts: list[str]
) -> None:
    ids = {text: index for index, text in enumerate([*"ab▁c", *pieces])}
    values = [0.0] * 4 + [float(score) for score in scores]
    merger = SentencePieceMerger(
        pieces=ids, scores=values, byte_ids={}, unknown_id=None, unused_ids=frozenset()
    )
    spelled = list(ids)
    for text in texts:
        assert [spelled[i] for i in merger.encode(text)] == merge_slowly(text, ids, values)


MANY = ["x"] * 3
HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("byte_level", {"model": None}, "tokenizer.ggml.model is missing"),
    ("byte_level", {"model": "bert"}, "supported are 'gpt2'"),
    ("byte_level", {"model": np.array(["gpt2", "llama"])}, "supported are 'gpt2'"),
    ("byte_level", {"tokens": None}, "tokens is missing"),
    ("byte_level", {"tokens": []}, "tokens is empty"),
    ("byte_level", {"tokens": "text"}, "not an array of strings"),
    ("byte_level", {"tokens": [1, 2]}, "not an array of strings"),
    ("byte_level", {"tokens": ["\udc80"]}, "not UTF-8"),
    ("byte_level", {"tokens": MANY, "token_type": [1] * 3, "merges": []}, "'x' twice"),
    ("byte_level", {"pre": "nonsense"}, "known are .*llama-bpe"),
    ("byte_level", {"pre": 7}, "known are"),
    ("byte_level", {"merges": None}, "merges is missing"),
    ("byte_level", {"merges": ["ab"]}, "entry 0 is 'ab'"),
    ("byte_level", {"merges": ["a b c"]}, "entry 0"),
    ("byte_level", {"merges": [" "]}, "entry 0"),
    ("byte_level", {"merges": ["a zz"]}, "no token"),
    ("byte_level", {"token_type": [1]}, "1 entries for"),
    ("byte_level", {"token_type": "1"}, "not an array of numbers"),
    ("byte_level", {"bos_token_id": 10**6}, "bos_token_id is 1000000, but the vocabulary"),
    ("byte_level", {"eos_token_id": -1}, "eos_token_id is -1"),
    ("byte_level", {"eos_token_id": True}, "not a token id"),
    ("byte_level", {"eot_token_id": "x"}, "not a token id"),
    ("byte_level", {"add_bos_token": 1}, "not true or false"),
    ("byte_level", {"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
    ("sentencepiece", {"scores": None}, "scores is missing"),
    ("sentencepiece", {"scores": [0.0]}, "1 entries for"),
    ("sentencepiece", {"scores": np.zeros((2, 2))}, "not an array of numbers"),
    ("sentencepiece", {"scores": [[1], [1, 2]]}, "not an array of numbers"),
    ("sentencepiece", {"scores": np.full(270, np.nan)}, "not finite"),
    ("sentencepiece", {"unknown_token_id": 10**6}, "unknown_token_id"),
    ("sentencepiece", {"token_type": np.full(270, 6)}, "typed as a byte"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), HOSTILE)
def test_hostile_metadata(
    kind: str, changes: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    metadata: Metadata = request.getfixturevalue(kind)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(metadata(**changes))


def test_hostile_templates(byte_level: Metadata) -> None:
    for changes in (
        {"tokenizer.chat_template": 5},
        {"tokenizer.chat_templates": ["x"] * 1000},
        {"tokenizer.chat_templates": ["x"], "tokenizer.chat_template.x": 3},
    ):
        with pytest.raises(ModelError, match=r"chat_template|chat template"):
            Tokenizer.from_gguf(byte_level() | changes)
