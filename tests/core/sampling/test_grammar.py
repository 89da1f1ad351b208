"""Grammars over a small tokenizer: masks, forced tokens, bounds, and what is kept."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from llguidance import LLMatcher

from polysilicon.errors import RequestError
from polysilicon.request import Grammar
from polysilicon.sampling.grammar import (
    MOST_BYTES,
    MOST_CACHED,
    MOST_CHOICES,
    Grammars,
    GrammarState,
    GrammarText,
    check_grammar,
)
from polysilicon.sampling.grammar_trial import GrammarTrial
from polysilicon.testing.tiny_models import EOS, VOCABULARY
from polysilicon.testing.tiny_text import write_text_side
from polysilicon.tokenizer import Tokenizer

WIDTH = VOCABULARY + 40
"""Of the logits: wider than the tokenizer, as padded models are."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_text_side(folder)
    return Tokenizer.from_directory(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(tokenizer, vocab_size=WIDTH, eos_ids=frozenset({EOS}))
    yield grammars
    grammars.close()


@pytest.fixture
def start(grammars: Grammars) -> Callable[[Grammar], GrammarState]:
    def start(grammar: Grammar) -> GrammarState:
        return GrammarState(grammars.compile(grammar).result().deep_copy())

    return start


def choice(*texts: str) -> Grammar:
    return Grammar(kind="choice", text=json.dumps(texts))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


def allowed(state: GrammarState) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(state.mask.view(np.uint8), bitorder="little")).tolist())


TEXTS = ("yes", "yesterday", "no", "né", "a+b", "", 'q"\\', "two words", "yes")


def test_the_mask_of_a_choice_is_what_continues_one_of_its_texts(
    grammars: Grammars, start: Callable[[Grammar], GrammarState], tokenizer: Tokenizer
) -> None:
    written = {tuple(encode(tokenizer, text)) for text in TEXTS}
    for text in {whole[:size] for whole in TEXTS for size in range(len(whole) + 1)}:
        state, before = start(choice(*TEXTS)), tuple(encode(tokenizer, text))
        state.consume(before)
        grammars.fill([state])
        follow = {
            ids[len(before)] for ids in written
            if ids[: len(before)] == before and len(ids) > len(before)
        }  # fmt: skip
        assert state.may_end == (text in TEXTS)
        assert state.at_end == (text in TEXTS and not follow)
        assert allowed(state) == follow | ({EOS} if state.may_end else set())
        assert state.error is None


def test_masks_of_many_states_are_those_of_each(
    grammars: Grammars, start: Callable[[Grammar], GrammarState], tokenizer: Tokenizer
) -> None:
    kinds = (
        Grammar(kind="json_object"), choice(*TEXTS), Grammar(kind="regex", text="[a-f]{2,9}x"),
        Grammar(kind="lark", text='start: "a" start | "b"'),
    )  # fmt: skip
    states = [start(kinds[index % 4]) for index in range(19)]
    for index, state in enumerate(states):
        state.consume(encode(tokenizer, {0: "{", 1: "yes", 2: "ab", 3: "aaa"}[index % 4]))
    grammars.fill(states)
    together = [state.mask.copy() for state in states]
    for state, mask in zip(states, together, strict=True):
        grammars.fill([state])
        assert (state.mask == mask).all()
        assert state.mask.shape == (-(-WIDTH // 32),)
        assert not {token for token in allowed(state) if token >= VOCABULARY}
    grammars.fill([])


def test_forced_tokens_are_the_tokenizers_own(
    start: Callable[[Grammar], GrammarState], tokenizer: Tokenizer
) -> None:
    schema = {
        "type": "object", "properties": {"long name": {"const": "é only"}},
        "required": ["long name"], "additionalProperties": False,
    }  # fmt: skip
    state = start(Grammar(kind="json_schema", text=json.dumps(schema)))
    assert state.forced() in ([], encode(tokenizer, "{"))
    state.consume(encode(tokenizer, '{"l'))
    forced = state.forced()
    assert tokenizer.decode(forced) == 'ong name"'
    assert forced == encode(tokenizer, 'ong name"')
    assert state.forced() == forced
    state.consume(forced)
    assert state.error is None


def test_a_draft_is_checked_and_tokens_are_taken_back(
    grammars: Grammars, start: Callable[[Grammar], GrammarState], tokenizer: Tokenizer
) -> None:
    state = start(choice("abcd", "abx"))
    grammars.fill([state])
    before = allowed(state)
    assert state.accepted(encode(tokenizer, "abcx")) == 3
    state.consume(encode(tokenizer, "abc"))
    state.rewind(3)
    grammars.fill([state])
    assert allowed(state) == before
    state.consume(encode(tokenizer, "abx"))
    assert state.at_end


def test_a_token_that_does_not_fit_is_an_error_of_its_own_state(
    start: Callable[[Grammar], GrammarState], tokenizer: Tokenizer
) -> None:
    broken, other = start(choice("abc")), start(choice("abc"))
    broken.consume(encode(tokenizer, "x"))
    assert "cannot be followed" in (broken.error or "")
    assert not broken.at_end
    other.consume(encode(tokenizer, "abc"))
    assert other.at_end


def test_without_an_end_token_the_mask_has_none(tokenizer: Tokenizer) -> None:
    for width in (VOCABULARY, 224, 256):
        grammars = Grammars(tokenizer, vocab_size=width, eos_ids=frozenset())
        state = GrammarState(grammars.compile(choice("a", "ab")).result().deep_copy())
        state.consume(encode(tokenizer, "a"))
        grammars.fill([state])
        assert state.mask.shape == (-(-width // 32),)
        assert allowed(state) == set(encode(tokenizer, "b"))
        grammars.close()


def test_what_is_forced_is_cut_as_the_middle_of_a_text() -> None:
    """Some encoders put a space before every text."""

    class Spaced:
        eos_id, bos_id = 1, None
        special_ids = frozenset({1})
        pieces = ("", "</s>", " ", "a", "b", " a", "ab", "\n")

        def token_bytes(self, token: int) -> bytes:
            return self.pieces[token].encode() if token < len(self.pieces) else b""

        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            ids, rest = [], f" {text}"
            while rest:
                known = [piece for piece in self.pieces[2:] if rest.startswith(piece)]
                piece = max(known, key=len, default=rest[0])
                ids += [self.pieces.index(piece)] if known else []
                rest = rest[len(piece) :]
            return ids

    grammars = Grammars(Spaced(), vocab_size=8, eos_ids=frozenset({1}))  # type: ignore[arg-type]
    state = GrammarState(grammars.compile(choice("abab")).result().deep_copy())
    assert state.forced() == [6, 6]
    grammars.close()


def test_grammars_are_compiled_once_and_the_oldest_forgotten(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, vocab_size=WIDTH, eos_ids=frozenset({EOS}))
    first = grammars.compile(choice("first"))
    assert grammars.compile(choice("first")) is first
    for index in range(MOST_CACHED):
        grammars.compile(choice("first"))
        grammars.compile(choice(f"other {index}")).result()
    assert grammars.compile(choice("first")) is first
    for index in range(MOST_CACHED):
        grammars.compile(choice(f"more {index}")).result()
    assert grammars.compile(choice("first")) is not first
    refused = grammars.compile(Grammar(kind="regex", text="("))
    assert isinstance(refused.exception(), RequestError)
    assert grammars.compile(Grammar(kind="regex", text="(")) is not refused
    grammars.close()


REFUSED = {
    "regex parse error": Grammar(kind="regex", text="a(b"),
    "look-around": Grammar(kind="regex", text="a(?=b)"),
    "expecting rule": Grammar(kind="lark", text="start: )"),
    "unknown name": Grammar(kind="lark", text="start: missing"),
    "'not' at #": Grammar(kind="json_schema", text='{"not": {}}'),
    "choice is a JSON list of texts": Grammar(kind="choice", text='["a", 1]'),
    "at least one": Grammar(kind="choice", text="[]"),
    "JSON list": Grammar(kind="choice", text="["),
    "at most": Grammar(kind="choice", text=json.dumps(["x"] * (MOST_CHOICES + 1))),
    "longer than": Grammar(kind="regex", text="é" * (MOST_BYTES // 2) + "a"),
    "Unsatisfiable": Grammar(kind="json_schema", text='{"type": "integer", "enum": ["a"]}'),
    "matches no text": Grammar(kind="json_schema", text='{"allOf": [{"$ref": "#"}]}'),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_used_has_one_clear_error(grammars: Grammars, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        grammars.compile(REFUSED[words]).result()
    assert len(str(caught.value)) < 800


def test_the_largest_that_is_taken() -> None:
    check_grammar(Grammar(kind="regex", text="a" * MOST_BYTES))
    check_grammar(Grammar(kind="choice", text=json.dumps(["x"] * MOST_CHOICES)))


HOSTILE = {
    "intersections take for ever": Grammar(
        kind="lark",
        text="start: T\nT: "
        + " & ".join(f"/(.|\\n)*[a-z]{{{i},{i + 7}}}.*/" for i in range(1, 40)),
    ),
    "many alternatives": Grammar(
        kind="lark", text="start: " + " | ".join(json.dumps(f"v{i}") for i in range(9000))
    ),
    "exponential unions": Grammar(
        kind="json_schema",
        text=json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)
                ]
            }
        ),
    ),
    "parentheses": Grammar(kind="regex", text="(" * 100_000 + ")" * 100_000),
    "counts of counts": Grammar(kind="regex", text="a?" * 5000 + "a" * 5000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_alone(
    grammars: Grammars, start: Callable[[Grammar], GrammarState], tokenizer: Tokenizer, name: str
) -> None:
    future = grammars.compile(HOSTILE[name])
    with pytest.raises(RequestError, match="cannot be used"):
        future.result(timeout=200)
    state = start(choice("well"))
    state.consume(encode(tokenizer, "well"))
    assert state.at_end


def test_other_threads_go_on_while_a_grammar_compiles(grammars: Grammars) -> None:
    texts = [f"{index} {index * 7919} and more" for index in range(MOST_CHOICES // 2)]
    grammars.warm()
    future = grammars.compile(choice(*texts))
    ticks = 0
    while not future.done():
        time.sleep(0.001)
        ticks += 1
    assert future.result() is not None
    assert ticks > 3


def test_closing_ends_a_trial_that_runs(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, vocab_size=WIDTH, eos_ids=frozenset({EOS}))
    grammars.compile(choice("warm")).result()
    hostile = HOSTILE["intersections take for ever"].text
    # How long each of them lasts depends on the machine: the last cannot have begun.
    trials = [grammars.compile(Grammar(kind="lark", text=hostile + "\n" * n)) for n in range(40)]
    time.sleep(0.5)
    began = time.monotonic()
    grammars.close()
    assert time.monotonic() - began < 4
    assert trials[-1].cancelled()
    begun = [trial for trial in trials if not trial.cancelled()]
    assert begun
    assert all(isinstance(trial.exception(), RequestError) for trial in begun)


def test_one_that_is_hard_to_compile_does_not_hold_up_the_next(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, vocab_size=WIDTH, eos_ids=frozenset({EOS}))
    hard = grammars.compile(HOSTILE["intersections take for ever"])
    assert grammars.compile(choice("easy")).result(timeout=60) is not None
    assert not hard.done()
    grammars.close()


def test_a_trial_survives_the_death_of_its_child() -> None:
    trial = GrammarTrial()
    assert trial.error('start: "a"') is None
    trial.kill()
    time.sleep(0.1)
    assert trial.error('start: "a"') is not None
    assert trial.error('start: "a"') is None
    trial.close()
    trial.close()


def test_a_grammar_that_overflows_the_stack_ends_its_trial() -> None:
    definitions = {
        f"d{index}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{index + 1}"}}}
        for index in range(20_000)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d20000": {"type": "null"}}}
    trial = GrammarTrial()
    assert "nests too deeply" in (
        trial.error(LLMatcher.grammar_from_json_schema(json.dumps(schema))) or ""
    )
    assert trial.error('start: "a"') is None
    trial.close()


@pytest.mark.parametrize(
    ("grammar", "whole", "partial"),
    [
        (choice("ab", "abc"), "ab", "a"),
        (Grammar(kind="regex", text="(ab|é)*"), "abé", "aba"),
        (Grammar(kind="lark", text='start: "x" start | "y"'), "xxy", "xx"),
    ],
)
def test_texts_that_are_complete(grammar: Grammar, whole: str, partial: str) -> None:
    text = GrammarText(grammar)
    assert text.matches(whole)
    assert not text.matches(partial)
    assert not text.matches(whole + "z")


def test_nothing_follows_a_complete_json_value() -> None:
    assert not GrammarText(Grammar(kind="json_object")).matches("{}")
