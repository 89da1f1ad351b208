"""From tokens to text: the client over an engine whose tokens are scripted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from polysilicon.backend import AdapterWeights, Batch, PendingTokens, SampledTokens, SamplingBatch
from polysilicon.engine.client import Client
from polysilicon.engine.engine import Engine
from polysilicon.errors import RequestError
from polysilicon.kv import GroupSpec, KVManager
from polysilicon.kv.manager import SlotCopy
from polysilicon.request import FinishReason, Request, SamplingParams
from polysilicon.tokenizer import Tokenizer
from polysilicon.tokenizer_vocabulary import TokenizerParts, Vocabulary

EOS = 256
WORDS = ("Hello", " world", "ab", "bc", "é")


class NoEncoder:
    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        raise NotImplementedError


def tokenizer() -> Tokenizer:
    """Tokens 0 to 255 are bytes, then the end, then some words."""
    texts = [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>", *WORDS]
    return Tokenizer(
        TokenizerParts(
            vocabulary=Vocabulary(
                texts=texts,
                style="sentencepiece",
                verbatim_ids=frozenset({EOS}),
                special_ids=frozenset({EOS}),
                byte_values={byte: byte for byte in range(256)},
            ),
            encoder=NoEncoder(),
            bos_id=None,
            eos_id=EOS,
            eos_ids=frozenset({EOS}),
            prefix_ids=(),
            suffix_ids=(),
            chat_templates={},
        )
    )


def ids_of(text: str | Sequence[Any]) -> list[int]:
    """Bytes of a text; in a list, words and numbers as one token each."""
    if isinstance(text, str):
        return list(text.encode())
    return [part if isinstance(part, int) else 257 + WORDS.index(part) for part in text]


@dataclasses.dataclass
class Answered:
    tokens: SampledTokens

    def result(self) -> SampledTokens:
        return self.tokens


class ScriptedExecutor:
    """Says the script of a choice, token by token, and goes on with dots."""

    vocab_size = 257 + len(WORDS)
    max_sequences = 8

    def __init__(self, scripts: Mapping[int, list[int]], prompt: int) -> None:
        self.scripts = scripts
        self.prompt = prompt
        self.steps = 0

    def step(
        self,
        batch: Batch,
        sampling: SamplingBatch,
        copies: Sequence[SlotCopy],
        previous: PendingTokens | None,
    ) -> Answered:
        self.steps += 1
        tokens = []
        for choice, position in zip(sampling.choice, sampling.position, strict=True):
            script, index = self.scripts[int(choice)], int(position) - self.prompt
            tokens.append(script[index] if index < len(script) else ord("."))
        return Answered(SampledTokens(tokens=np.array(tokens, np.int32)))

    def write_adapter(self, slot: int, weights: AdapterWeights) -> None: ...

    def clear_adapter(self, slot: int) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass
class Choice:
    text: str = ""
    pieces: list[str] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_text: str | None = None


Say = Callable[..., list[Choice]]
PROMPT = (ord("?"),)


@pytest.fixture
def say() -> Say:
    """The choices of one request, by the scripts of what they say."""

    def say(
        *scripts: Any,
        prompt: tuple[int, ...] = PROMPT,
        cancel_after: int | None = None,
        **params: Any,
    ) -> list[Choice]:
        executor = ScriptedExecutor(
            {index: ids_of(script) for index, script in enumerate(scripts)}, len(prompt)
        )
        kv = KVManager(
            groups=[GroupSpec(name="full", pages=65, window=None)],
            page_size=4,
            max_sequences=8,
            max_length=64,
        )
        engine = Engine(
            executor=executor,
            kv=kv,
            eos_ids=frozenset({EOS}),
            step_tokens=16,
            max_length=64,
            model_identity="scripted",
            kv_dtype="f32",
        )
        client = Client(engine, tokenizer())
        values = {"max_tokens": 12, "temperature": 0.0, "n": len(scripts)}
        client.submit(Request(id="r", prompt=prompt, params=SamplingParams(**values | params)))
        choices = [Choice() for _ in scripts]
        polls = 0
        while client.has_work:
            if polls == cancel_after:
                client.cancel("r")
            for output in client.poll():
                choice = choices[output.choice]
                assert choice.finish_reason is None, "news after the end"
                choice.text += output.text
                choice.pieces.append(output.text)
                choice.ids += output.ids
                choice.finish_reason = output.finish_reason
                choice.stop_text = output.stop_text
            polls += 1
            assert polls < 100
        kv.check_integrity()
        assert all(usage.in_use == usage.limbo == 0 for usage in kv.usage())
        assert executor.steps <= max(len(choice.ids) for choice in choices) + 3
        client.close()
        return choices

    return say


def test_text_comes_with_its_tokens(say: Say) -> None:
    [choice] = say(["Hello", " world"], max_tokens=2)
    assert choice.pieces == ["Hello", " world"]
    assert choice.finish_reason is FinishReason.LENGTH


def test_characters_come_whole(say: Say) -> None:
    [choice] = say("aé€", max_tokens=6)
    assert choice.pieces == ["a", "", "é", "", "", "€"]


def test_an_unfinished_character_ends_the_text(say: Say) -> None:
    [choice] = say("a€", max_tokens=3)
    assert choice.text == "a\N{REPLACEMENT CHARACTER}"


def test_a_character_that_the_prompt_began(say: Say) -> None:
    first, second = "é".encode()
    [choice] = say([second, 33], prompt=(65, first), max_tokens=2)
    assert choice.text == "é!"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("script", ["xyabcde", ["ab", "bc"], [120, "ab", 99], [97, "bc"]])
def test_stop_texts_across_tokens(say: Say, script: Any, include: bool) -> None:
    [choice] = say(script, stop=("bc",), include_stop_text=include)
    whole = b"".join(tokenizer().token_bytes(token) for token in ids_of(script)).decode()
    end = whole.index("bc") + 2 * include
    assert choice.text == whole[:end]
    assert choice.finish_reason is FinishReason.STOP
    assert choice.stop_text == "bc"


def test_the_first_of_several_stop_texts(say: Say) -> None:
    [choice] = say("one two three", stop=("three", "two", "wo"))
    assert (choice.text, choice.stop_text) == ("one ", "two")


def test_what_may_begin_a_stop_text_is_held_back(say: Say) -> None:
    [choice] = say("xababd", stop=("abc",), max_tokens=6)
    assert choice.pieces == ["x", "", "", "ab", "", "abd"]


def test_what_was_held_back_comes_at_the_end(say: Say) -> None:
    [choice] = say("xxab", stop=("abc",), max_tokens=4)
    assert choice.pieces == ["x", "x", "", "ab"]
    assert choice.finish_reason is FinishReason.LENGTH
    assert choice.stop_text is None


def test_no_stop_text_before_min_tokens(say: Say) -> None:
    [choice] = say("a.b.c.d", stop=(".",), min_tokens=4)
    assert (choice.text, choice.stop_text) == ("a.b", ".")
    assert len(choice.ids) == 4


def test_a_stop_text_on_the_last_token(say: Say) -> None:
    [choice] = say("ab", stop=("b",), max_tokens=2)
    assert (choice.text, choice.finish_reason) == ("a", FinishReason.STOP)


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens(say: Say, include: bool) -> None:
    [choice] = say(
        ["Hello", " world", 33], stop_token_ids=(ids_of([" world"])[0],), include_stop_text=include
    )
    assert choice.text == ("Hello world" if include else "Hello")
    assert (choice.finish_reason, choice.stop_text) == (FinishReason.STOP, None)


@pytest.mark.parametrize("skip", [True, False])
def test_end_of_sequence(say: Say, skip: bool) -> None:
    [choice] = say(["Hello", EOS, 33], skip_special_tokens=skip)
    assert (choice.text, choice.finish_reason) == ("Hello", FinishReason.STOP)
    [choice] = say(["Hello", EOS, 33], skip_special_tokens=skip, ignore_eos=True, max_tokens=3)
    assert choice.text == ("Hello!" if skip else "Hello</s>!")


def test_choices_end_on_their_own(say: Say) -> None:
    first, second = say("so long", "so it goes on", stop=("ng",))
    assert (first.text, first.finish_reason) == ("so lo", FinishReason.STOP)
    assert (second.text, second.finish_reason) == ("so it goes o", FinishReason.LENGTH)


def test_cancelling_gives_what_was_held_back(say: Say) -> None:
    [choice] = say("xxab.....", stop=("ab......",), cancel_after=7)
    assert choice.finish_reason is FinishReason.CANCELLED
    assert choice.text.startswith("xxab")
    assert len(choice.text) == len(choice.ids)


def test_a_refused_request_leaves_nothing(say: Say) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        say("x", stop_token_ids=(9999,))
    with pytest.raises(RequestError, match="must fit into the context"):
        say("x", prompt=(65,) * 64)
