"""What callers hold: requests in, text out. The engine behind it may be in another process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from polysilicon.detokenizer import IncrementalDetokenizer, StopChecker
from polysilicon.errors import RequestError
from polysilicon.request import FinishReason, Request, RequestOutput, RequestTimes
from polysilicon.sampling.grammar import GrammarText
from polysilicon.tokenizer import Tokenizer


class EngineLink(Protocol):
    """The engine as its client sees it."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def cancel(self, request_id: str, choice: int | None = None) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def close(self) -> None: ...


_BROKEN_OFF = (FinishReason.CANCELLED, FinishReason.ERROR)
"""Reasons that stand, even where the last of the text completes a stop text."""


class _ChoiceText:
    """The text of one choice as its tokens come. grammar: with which stop texts must wait."""

    def __init__(self, request: Request, tokenizer: Tokenizer, grammar: GrammarText | None) -> None:
        params = request.params
        self.min_tokens = params.min_tokens
        self.include_stop_text = params.include_stop_text
        self.num_tokens = 0
        self.times: RequestTimes | None = None
        self.detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special=params.skip_special_tokens,
            prompt_ids=request.prompt,
            exact=request.grammar is not None,
        )
        self.let_out = ""
        self.grammar = grammar
        self.stops = StopChecker(
            params.stop,
            include=params.include_stop_text,
            may_stop=None if self.grammar is None else self._is_whole,
        )

    def take(self, output: RequestOutput) -> RequestOutput:
        """The output with its text; finished when a stop text came."""
        output = self._take(output)
        if self.grammar is not None:
            self.let_out += output.text
        return output

    def _is_whole(self, text: str) -> bool:
        """Whether the grammar is complete before a stop text: inside of what it wants, none ends
        it."""
        assert self.grammar is not None
        return self.grammar.matches(self.let_out + text)

    def _take(self, output: RequestOutput) -> RequestOutput:
        ids = output.ids
        if output.finish_reason is FinishReason.STOP and not self.include_stop_text:
            ids = ids[:-1]
        text = self.detokenizer.push(ids)
        self.num_tokens += len(output.ids)
        self.times = output.times or self.times
        if output.finish_reason is not None:
            text += self.detokenizer.flush()
        if self.num_tokens >= self.min_tokens:
            text = self.stops.push(text)
        if self.stops.matched is not None and output.finish_reason not in _BROKEN_OFF:
            return dataclasses.replace(
                output,
                text=text,
                finish_reason=FinishReason.STOP,
                stop_text=self.stops.matched,
                times=self._ended_now() if output.finish_reason is None else output.times,
            )
        if output.finish_reason is not None:
            text += self.stops.flush()
        return dataclasses.replace(output, text=text)

    def _ended_now(self) -> RequestTimes | None:
        return self.times and dataclasses.replace(self.times, finished=time.monotonic())


class Client:
    """Submits requests to an engine and turns its tokens into text, stop texts included."""

    def __init__(self, engine: EngineLink, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._texts: dict[str, dict[int, _ChoiceText]] = {}
        self._cut: set[tuple[str, int]] = set()
        """Choices that a stop text ended, of which the engine's own last news is still to come."""

    @property
    def has_work(self) -> bool:
        return bool(self._texts) or self.engine.has_work

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it cannot be served as it stands."""
        if request.id in self._texts:
            raise RequestError(f"request {request.id!r} has not ended: give each its own id")
        self.engine.add(request)
        # Compiled once for all choices.
        grammar = None
        if request.grammar is not None and request.params.stop:
            grammar = GrammarText(request.grammar)
        self._texts[request.id] = {
            choice: _ChoiceText(request, self.tokenizer, grammar)
            for choice in range(request.params.n)
        }

    def cancel(self, request_id: str) -> None:
        """End a request; its choices finish as cancelled. Unknown ids are ignored."""
        self.engine.cancel(request_id)

    def poll(self) -> list[RequestOutput]:
        """News since the last call; lets the engine in this process run a step for them."""
        news = []
        for output in self.engine.step():
            if (output.request_id, output.choice) in self._cut:
                if output.finish_reason is not None:
                    self._cut.remove((output.request_id, output.choice))
                continue
            choices = self._texts.get(output.request_id, {})
            if output.choice not in choices:
                continue
            output_with_text = choices[output.choice].take(output)
            if output_with_text.finish_reason is not None:
                if output.finish_reason is None:
                    self._cut.add((output.request_id, output.choice))
                    self.engine.cancel(output.request_id, output.choice)
                del choices[output.choice]
                if not choices:
                    del self._texts[output.request_id]
            news.append(output_with_text)
        return news

    def generate(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Run requests as one continuous batch and yield their news until all have ended."""
        for request in requests:
            self.submit(request)
        yield from self.drain()

    def drain(self) -> Iterator[RequestOutput]:
        """News until everything that was submitted has ended."""
        while self.has_work:
            yield from self.poll()

    def close(self) -> None:
        self.engine.close()
