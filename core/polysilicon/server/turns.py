"""One assistant's turn: from a request's news to events, and all of them put together."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence

from polysilicon.request import (
    SLO,
    FinishReason,
    Grammar,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from polysilicon.server.chat_plan import ChatPlan
from polysilicon.server.dispatcher import Dispatcher, RequestStream
from polysilicon.server.errors import ApiError
from polysilicon.server.events import (
    Event,
    Finished,
    FinishedReason,
    OutputParser,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Update,
)
from polysilicon.server.service import Service, Usage


def check_output(output: RequestOutput) -> None:
    """Raises ApiError for a choice that the engine or the server's end broke off."""
    if output.finish_reason is FinishReason.ERROR:
        raise ApiError(500, output.error or "the engine failed")
    if output.finish_reason is FinishReason.CANCELLED:
        raise ApiError(503, output.error or "the server ends: the request was cancelled")


def stop_of(request: Request, output: RequestOutput, eos_ids: frozenset[int]) -> str | int | None:
    """The stop text or stop token that ended a choice; None for end-of-sequence and length."""
    if output.finish_reason is not FinishReason.STOP:
        return None
    if output.stop_text is not None:
        return output.stop_text
    last = output.ids[-1] if output.ids else None
    asked = last in request.params.stop_token_ids
    return last if asked and (request.params.ignore_eos or last not in eos_ids) else None


class ChatTurn:
    """A rendered chat on its way through the engine.

    parser: makes the parser of one choice's text, None where all of it is the answer.
    stops_for_calls: whether an answer with tool calls ended because of them.
    """

    def __init__(
        self,
        request: Request,
        *,
        eos_ids: frozenset[int],
        parser: Callable[[], OutputParser] | None = None,
        stops_for_calls: bool = True,
    ) -> None:
        self.request = request
        self.usage = Usage(len(request.prompt))
        self._eos_ids = eos_ids
        count = request.params.n
        self._parsers = None if parser is None else [parser() for _ in range(count)]
        self._stops_for_calls = stops_for_calls
        self._called = [False] * count

    async def updates(self, dispatcher: Dispatcher) -> AsyncGenerator[list[Update], None]:
        """Run the request: news as they come, all that is there at once in one list.

        Closing the iterator cancels the request. Raises what `Dispatcher.submit` does, and ApiError
        when the engine breaks off."""
        with dispatcher.submit(self.request) as stream:
            async for outputs in stream:
                yield [self.take(output) for output in outputs]

    def take(self, output: RequestOutput) -> Update:
        """What news of the request mean. Raises ApiError when the engine broke it off."""
        check_output(output)
        choice = output.choice
        usage = self.usage
        usage.completion_tokens += len(output.ids)
        usage.cached_tokens = max(usage.cached_tokens, output.num_cached_tokens)
        events: Sequence[Event]
        if self._parsers is None:
            events = (TextDelta(output.text),) if output.text else ()
        else:
            events = self._parsed(self._parsers[choice], output)
            self._called[choice] |= any(type(event) is ToolCallStart for event in events)
        finished = None
        if output.finish_reason is not None:
            reason: FinishedReason = "stop"
            if self._called[choice] and self._stops_for_calls:
                reason = "tool_calls"
            if output.finish_reason is FinishReason.LENGTH:
                reason = "length"
            finished = Finished(reason, stop_of(self.request, output, self._eos_ids))
        return Update(choice, events, output, finished)

    def _parsed(self, parser: OutputParser, output: RequestOutput) -> Sequence[Event]:
        events = list(parser.push(output.text)) if output.text else []
        if output.ids and any(type(event) is ReasoningDelta for event in events):
            self.usage.reasoning_tokens += len(output.ids)
        if output.finish_reason is not None:
            events += parser.finish()
        return events


async def chat_turn(
    service: Service,
    plan: ChatPlan,
    params: SamplingParams,
    *,
    add_special: bool = False,
    keep: int | None = None,
    salt: str | None = None,
    priority: int = 0,
    slo: SLO | None = None,
    grammar: Grammar | None = None,
) -> ChatTurn:
    """The turn of a planned chat. add_special: encode the prompt with the tokens that begin a text.
    keep: as in `Service.truncated`. Raises ApiError (400)."""
    prompt = await service.prompts.encode(plan.text, add_special=add_special)
    if plan.show_special:
        params = dataclasses.replace(params, skip_special_tokens=False)
    request = service.request(
        service.truncated(prompt, keep),
        params,
        salt=salt,
        priority=priority,
        slo=slo,
        grammar=plan.grammar or grammar,
    )
    return ChatTurn(
        request,
        eos_ids=service.tokenizer.eos_ids,
        parser=plan.parser,
        stops_for_calls=plan.stops_for_calls,
    )


@dataclasses.dataclass(slots=True)
class ToolCall:
    """A whole tool call; arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class Answer:
    """One choice put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finished: Finished = dataclasses.field(default_factory=lambda: Finished("stop"))

    def take(self, update: Update) -> None:
        """Add news of this choice."""
        for event in update.events:
            if isinstance(event, TextDelta):
                self.text += event.text
            elif isinstance(event, ReasoningDelta):
                self.reasoning += event.text
            elif isinstance(event, ToolCallStart):
                self.calls.append(ToolCall(event.id, event.name))
            elif isinstance(event, ToolCallDelta):
                self.calls[event.index].arguments += event.arguments
        self.ids += update.output.ids
        self.logprobs += update.output.logprobs
        if update.finished is not None:
            self.finished = update.finished


@dataclasses.dataclass(frozen=True, slots=True)
class TurnResult:
    """A whole turn. answers: of every choice in order. prompt_logprobs: of the prompt."""

    answers: list[Answer]
    prompt_logprobs: tuple[TokenLogprobs, ...]


async def whole_turn(turn: ChatTurn, dispatcher: Dispatcher) -> TurnResult:
    """Run a turn to its end. Raises as `ChatTurn.updates`."""
    answers = [Answer() for _ in range(turn.request.params.n)]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    with dispatcher.submit(turn.request) as stream:
        async for outputs in stream:
            for output in outputs:
                update = turn.take(output)
                answers[update.choice].take(update)
                prompt_logprobs = prompt_logprobs or output.prompt_logprobs
    return TurnResult(answers, prompt_logprobs)


async def merged(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[tuple[int, list[RequestOutput]], None]:
    """News of several requests as they come, with the request's place. Raises as the streams."""
    if len(streams) == 1:
        async for outputs in streams[0]:
            yield 0, outputs
        return
    waiting = {asyncio.ensure_future(_next(s)): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                news = task.result()
                if news is not None:
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
                    yield index, news
    finally:
        for task in waiting:
            task.cancel()


async def _next(stream: RequestStream) -> list[RequestOutput] | None:
    return await anext(stream, None)
