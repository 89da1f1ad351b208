"""Sequences whose output follows a grammar: they wait for it, jump over what it forces, and have
their masks kept up to date."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from polysilicon.engine.batching import SequenceSampling
from polysilicon.errors import RequestError
from polysilicon.request import Grammar
from polysilicon.sampling.grammar import Grammars, GrammarState
from polysilicon.scheduler import Scheduler
from polysilicon.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLMatcher

_IDLE_SECONDS = 0.002
"""How long a step waits for a grammar when there is nothing else to do."""


class Following:
    """What the engine keeps of grammars. grammars: compiles them."""

    def __init__(self, grammars: Grammars, scheduler: Scheduler) -> None:
        self.grammars = grammars
        self._scheduler = scheduler
        self._waiting: list[tuple[concurrent.futures.Future[LLMatcher], list[Sequence]]] = []

    @property
    def num_waiting(self) -> int:
        """Sequences whose grammar is being compiled."""
        return sum(len(_living(sequences)) for _, sequences in self._waiting)

    def wait(self, grammar: Grammar, sequences: list[Sequence]) -> None:
        """Hold sequences back until their grammar is compiled."""
        self._waiting.append((self.grammars.compile(grammar), list(sequences)))

    def ready(self, *, idle: bool) -> Iterator[tuple[list[Sequence], LLMatcher | RequestError]]:
        """Sequences that need not wait any longer, with a matcher at the start of their grammar, or
        with what is wrong with it. idle: nothing else is to be done, so wait a moment."""
        if idle:
            concurrent.futures.wait(
                [future for future, _ in self._waiting],
                timeout=_IDLE_SECONDS,
                return_when=concurrent.futures.FIRST_COMPLETED,
            )
        waiting, self._waiting = self._waiting, []
        for future, sequences in waiting:
            if not future.done():
                self._waiting.append((future, sequences))
                continue
            try:
                yield _living(sequences), future.result()
            except RequestError as error:
                yield _living(sequences), error
            except Exception as error:
                yield _living(sequences), RequestError(f"the grammar cannot be compiled: {error}")

    def jump(self, sequence: Sequence, sampling: SequenceSampling) -> tuple[int, ...]:
        """Append what the grammar forces to come next, without a forward pass of its own; the
        sequence may end of it. Log-probabilities need a pass for every token, so that where they
        are wanted nothing is jumped over."""
        if (
            sequence.finish_reason is not None
            or sequence.max_tokens == 0
            or sampling.logprobs is not None
            or sampling.prompt_logprobs is not None
        ):
            return ()
        taken = []
        for token in sampling.sampler.forced():
            self._scheduler.append(sequence, token)
            sampling.sampler.append(token)
            taken.append(token)
            if sequence.finish_reason is not None:
                break
        return tuple(taken)

    def settle(
        self, following: Iterable[tuple[Sequence, SequenceSampling]]
    ) -> list[tuple[Sequence, str | None]]:
        """Bring masks up to date after new tokens. Returns the sequences that end here: complete,
        so that no token can come, not even one that ends the text (None), or with an error."""
        ended: list[tuple[Sequence, str | None]] = []
        open_: list[tuple[Sequence, SequenceSampling, GrammarState]] = []
        for sequence, sampling in following:
            grammar = sampling.sampler.grammar
            assert grammar is not None
            if grammar.at_end:
                ended.append((sequence, None))
            elif sequence.finish_reason is None:
                open_.append((sequence, sampling, grammar))
        self.grammars.fill([grammar for _, _, grammar in open_ if grammar.error is None])
        for sequence, sampling, grammar in open_:
            if grammar.error is not None:
                ended.append((sequence, grammar.error))
            elif grammar.at_end:
                ended.append((sequence, None))
            elif not sampling.sampler.restrict():
                ended.append((sequence, _NO_TOKEN))
        return ended


_NO_TOKEN = (
    "no token may come next: what the grammar wants is excluded by allowed_token_ids, bad_words, "
    "min_tokens or ignore_eos; change one of them"
)


def _living(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.finish_reason is None]
