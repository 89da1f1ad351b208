"""A text's tokens in windows of a model's context, by one of two conventions.

`huggingface`: as in Hugging Face's guide to the perplexity of fixed-length models. Windows of
`context` tokens, each `stride` further than the one before; a window scores what the one before it
did not reach, so that every token is scored once, the first excepted where nothing stands before
it. The last window may be shorter.

`llamacpp`: as in llama.cpp's `llama-perplexity`. Windows of `context` tokens, one behind the other;
the second half of each is scored, and what is left of the text behind the last whole window is
not used.

In both a window begins with what the tokenizer puts before a text, such as BOS: in place of the
first token with `llamacpp`, as there, and before it with `huggingface`, where the guide's model has
no such token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from polysilicon.errors import ConfigError
from polysilicon.tokenizer import Tokenizer

Convention = Literal["huggingface", "llamacpp"]

MIN_CONTEXT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """tokens: what the model reads. first: index of the first one that is scored, at least 1."""

    tokens: tuple[int, ...]
    first: int

    @property
    def scored(self) -> tuple[int, ...]:
        return self.tokens[self.first :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How a text is cut. stride: of `huggingface`, None for half a context.

    Raises ConfigError for numbers that do not go together.
    """

    convention: Convention = "huggingface"
    context: int = 512
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.context < MIN_CONTEXT:
            raise ConfigError(f"--context must be at least {MIN_CONTEXT}, not {self.context}")
        if self.stride is not None and self.convention == "llamacpp":
            raise ConfigError("--stride goes with --convention huggingface: leave one of them out")
        if not 0 < self.step <= self.context:
            raise ConfigError(
                f"--stride must lie between 1 and --context {self.context}, not {self.stride}"
            )

    @property
    def step(self) -> int:
        return self.context // 2 if self.stride is None else self.stride

    def windows(self, tokens: Sequence[int], beginning: Sequence[int]) -> Iterator[Window]:
        """Windows of a text's tokens. beginning: what the tokenizer puts before a text.

        Raises ConfigError when nothing can be scored.
        """
        if self.convention == "llamacpp":
            return self._halves([*beginning, *tokens], beginning)
        return self._sliding(tokens, tuple(beginning))

    def describe(self, beginning: str) -> str:
        """The convention in words. beginning: what the tokenizer puts before a text, as text."""
        if self.convention == "llamacpp":
            begins = f", each with {beginning} for its first" if beginning else ""
            return (
                f"as llama.cpp does: windows of {self.context} tokens side by side{begins}; the "
                "second half of each"
            )
        begins = f", {beginning} before each" if beginning else ""
        return (
            f"as Hugging Face does: windows of {self.context} tokens, {self.step} further each"
            f"{begins}; each token once"
        )

    def _sliding(self, tokens: Sequence[int], beginning: tuple[int, ...]) -> Iterator[Window]:
        room = self.context - len(beginning)
        if self.step > room:
            raise ConfigError(
                f"--stride {self.step} leaves gaps: {len(beginning)} of the {self.context} tokens "
                f"of a window begin the text; take at most {room}"
            )
        if len(tokens) + bool(beginning) < 2:
            raise ConfigError(f"the text has {len(tokens)} token(s), of which none can be scored")
        reached = 0
        for start in range(0, len(tokens), self.step):
            end = min(start + room, len(tokens))
            first = max(1, len(beginning) + reached - start)
            window = Window(tokens=(*beginning, *tokens[start:end]), first=first)
            if window.scored:
                yield window
            reached = end
            if end == len(tokens):
                return

    def _halves(self, tokens: Sequence[int], beginning: Sequence[int]) -> Iterator[Window]:
        if len(tokens) < self.context:
            raise ConfigError(
                f"the text has {len(tokens)} tokens, not even one window of {self.context}: lower "
                "--context, or take --convention huggingface"
            )
        for start in range(0, len(tokens) - self.context + 1, self.context):
            end = start + self.context
            window = (*beginning, *tokens[start + len(beginning) : end])
            yield Window(tokens=window, first=self.context // 2 + 1)


def beginning_of_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before a text: BOS, or nothing, or several tokens."""
    plain = tokenizer.encode("a", add_special=False, parse_special=False)
    whole = tokenizer.encode("a", add_special=True, parse_special=False)
    start = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return tuple(whole[:start])
