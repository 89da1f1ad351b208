"""Grammars: compiled off the step loop, kept by their text, and where each sequence is in its own.

A grammar becomes the mask of the tokens that may come next, so every device serves it. The work is
llguidance's (Earley parsing over derivatives of regular expressions, by token tries).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from polysilicon.batch import UInt32
from polysilicon.errors import RequestError
from polysilicon.request import Grammar
from polysilicon.sampling import json_schema
from polysilicon.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from polysilicon.sampling.grammar_trial import GrammarTrial

MOST_BYTES = 1 << 18
"""Of a grammar's text."""

MOST_CHOICES = 10_000
MOST_CACHED = 32
"""Compiled grammars that are kept."""

_THREADS = 2
"""So that one which is hard to compile does not hold up the others."""

_PARALLEL = 8
"""Masks from which on they are computed by several threads."""

_JSON_OPTIONS = {
    # A character has one spelling, so that no two spellings of a name are taken for two names.
    "json_allowed_escapes": 'nrbtf\\"',
    # One blank, or a new line with its indentation: a model cannot go on with white space for ever.
    "whitespace_pattern": r" |\n[ \t]{0,40}",
    # Options were proved disjoint.
    "coerce_one_of": True,
    "lenient": False,
}


def check_grammar(grammar: Grammar) -> None:
    """Refuse what can be refused without compiling. Raises RequestError."""
    if len(grammar.text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise RequestError(
            f"the grammar is longer than {MOST_BYTES >> 10} KiB of text: make it shorter"
        )
    if grammar.kind == "choice":
        _choices(grammar.text)


def source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises RequestError for one that it cannot hold."""
    from llguidance import LLMatcher

    check_grammar(grammar)
    match grammar.kind:
        case "json_object":
            schema = '{"type": "object"}'
        case "json_schema":
            schema = json_schema.normalise(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices = _choices(grammar.text)
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
    except ValueError as error:
        raise RequestError(f"JSON schema: {error}") from None


def _choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not (isinstance(choices, list) and choices and all(isinstance(x, str) for x in choices)):
        raise RequestError("a choice is a JSON list of texts, at least one")
    if len(choices) > MOST_CHOICES:
        raise RequestError(f"a choice has at most {MOST_CHOICES} texts, not {len(choices)}")
    return choices


class GrammarText:
    """Whether texts are complete by a grammar, for who has no tokens. The grammar must have been
    compiled by an engine before: it is trusted."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._start: LLMatcher | None = None

    def matches(self, text: str) -> bool:
        """Whether the text is complete, and the grammar might still go on."""
        if self._grammar.kind in ("json_object", "json_schema"):
            return False  # nothing comes behind a complete JSON value
        if self._start is None:
            from polysilicon.sampling.grammar_trial import byte_tokenizer, compiled

            self._start = compiled(byte_tokenizer(), source(self._grammar))
        matcher = self._start.deep_copy()
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


class GrammarState:
    """Where one sequence is in its grammar.

    mask: uint32 `[ceil(V / 32)]`, packed as `SamplingBatch.mask`: the tokens that may come next,
    as of the last `Grammars.fill`.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.mask: UInt32 = np.empty(0, np.uint32)

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed further, or None."""
        if not self._matcher.is_error():
            return None
        return f"the grammar cannot be followed any further: {_readable(self._matcher.get_error())}"

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete."""
        return self._matcher.is_accepting()

    @property
    def at_end(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def consume(self, tokens: Sequence[int]) -> None:
        """Go on by tokens; `error` says where one does not fit."""
        self._matcher.consume_tokens(list(tokens))

    def forced(self) -> list[int]:
        """Tokens that must come next, in the tokenizer's own spelling, not consumed."""
        tokens = self._matcher.compute_ff_tokens()
        return tokens if self.accepted(tokens) == len(tokens) else []

    def accepted(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft may come, from its start on; the state stays as it is."""
        return self._matcher.validate_tokens(list(draft))

    def rewind(self, count: int) -> None:
        """Take the last `count` tokens back."""
        self._matcher.rollback(count)


class Grammars:
    """Compiles grammars for one model, in threads of its own.

    vocab_size: width of the model's logits. eos_ids: tokens that end a text; there may be none.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(token for token in eos_ids if 0 <= token < vocab_size)
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="grammars")
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._trials: dict[int, GrammarTrial] = {}
        self._executor: LLExecutor | None = None

    def warm(self) -> None:
        """Prepare what all grammars share. It takes up to seconds, in which no other thread of this
        process gets on: where that matters, before the first request."""
        self._token_trie()

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Begin to compile a grammar, or find it. The future raises RequestError for one that is
        malformed, cannot be held, or is too large."""
        future = self._compiled.get(grammar)
        if future is None or (future.done() and future.exception() is not None):
            future = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        for old in list(self._compiled)[: max(0, len(self._compiled) - MOST_CACHED)]:
            if self._compiled[old].done():
                del self._compiled[old]
        return future

    def fill(self, states: Sequence[GrammarState]) -> None:
        """Compute the masks of states, which are not at their end."""
        if not states:
            return
        width = -(-self._padded_vocab_size // 32)
        masks = np.zeros((len(states), width), np.uint32)
        address, size = masks.ctypes.data, width * 4
        if len(states) < _PARALLEL:
            for row, state in enumerate(states):
                state._matcher.unsafe_compute_mask_ptr(address + row * size, size)
        else:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor()
            rows = [(state._matcher, row) for row, state in enumerate(states)]
            self._executor.unsafe_compute_mask_ptr(rows, address, size, len(states))
        if not self._eos_ids:
            masks[:, self._vocab_size // 32] &= ~np.uint32(1 << self._vocab_size % 32)
        for row, state in enumerate(states):
            state.mask = masks[row, : -(-self._vocab_size // 32)]

    def close(self) -> None:
        """End the threads and what they have started."""
        # First what has not begun, or it would as soon as a trial is killed.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._trials.values()):
            trial.kill()
        self._threads.shutdown(wait=True)
        for trial in self._trials.values():
            trial.close()

    @property
    def _padded_vocab_size(self) -> int:
        """llguidance wants an end token: where the model has none, one past its vocabulary."""
        return self._vocab_size + (not self._eos_ids)

    def _token_trie(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tokens is None:
                self._tokens = LLTokenizer(
                    TokenizerWrapper(_Tokens(self._tokenizer, self._padded_vocab_size)),
                    n_vocab=self._padded_vocab_size,
                    eos_token=self._eos_ids or [self._vocab_size],
                )
            return self._tokens

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from polysilicon.sampling.grammar_trial import GrammarTrial, compiled

        text = source(grammar)
        trial = self._trials.setdefault(threading.get_ident(), GrammarTrial())
        error = trial.error(text)
        if error is None:
            matcher = compiled(self._token_trie(), text)
            if not matcher.is_error():
                return matcher
            error = matcher.get_error()
        raise RequestError(f"the grammar ({grammar.kind}) cannot be used: {_readable(error)}")


class _Tokens:
    """Our tokenizer as llguidance wants it: the bytes of every token, and how text is cut."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id or 0
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < size)

    def __call__(self, data: bytes) -> list[int]:
        """Token ids of text in the middle of a text."""
        text = data.decode("utf-8", "replace")
        ids = self._encode(text)
        if self._bytes(ids) == data:
            return ids
        # A tokenizer that begins a text with a space: put something before it and take it away.
        ids = self._encode("\n" + text)
        while ids and self._bytes(ids) != data:
            del ids[0]
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token] for token in ids)


def _readable(error: str) -> str:
    text = error.split("<non-verbose/>")[0].strip()[:500]
    return "it matches no text" if text in ("NoExtension", "NoExtensionBias") else text
