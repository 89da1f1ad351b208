"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from polysilicon.server import json_text
from polysilicon.server.bodies import openapi_body, read_body
from polysilicon.server.chat_plan import plan_chat
from polysilicon.server.connection import EventStream, connected
from polysilicon.server.errors import invalid
from polysilicon.server.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    Update,
)
from polysilicon.server.openai.failures import DONE, failure_event
from polysilicon.server.openai.logprobs import LogprobsWriter
from polysilicon.server.openai.rendering import chat_input
from polysilicon.server.openai.sampling import engine_fields, sampling_params
from polysilicon.server.openai.schemas import ChatBody
from polysilicon.server.service import Service, new_id
from polysilicon.server.turns import Answer, ChatTurn, TurnResult, chat_turn, whole_turn


def chat_router(service: Service) -> APIRouter:
    """The endpoint's route."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", openapi_extra=openapi_body(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        body = await read_body(request, ChatBody)
        seconds = service.settings.request_timeout
        if body.stream:
            chat = await _prepare(service, body)
            return EventStream(chat.chunks(), seconds=seconds, failure=failure_event)
        async with connected(request.receive, seconds):
            chat = await _prepare(service, body)
            return json_text.response(chat.answer(await whole_turn(chat.turn, service.dispatcher)))

    return router


async def _prepare(service: Service, body: ChatBody) -> _Chat:
    """Check a body and render it. Raises ApiError, RequestError and TemplateError."""
    model = service.model_named(body.model)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: send both", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: send both", "stream_options")
    max_tokens = body.max_completion_tokens
    params = sampling_params(
        service,
        body,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    plan = await plan_chat(service, chat_input(body))
    turn = await chat_turn(
        service,
        plan,
        params,
        add_special=body.add_special_tokens,
        keep=body.truncate_prompt_tokens,
        **engine_fields(body),
    )
    return _Chat(service, body, turn, model)


class _Chat:
    """One chat completion in OpenAI's wire format."""

    def __init__(self, service: Service, body: ChatBody, turn: ChatTurn, model: str) -> None:
        self.turn = turn
        self._service = service
        self._body = body
        self._head = {
            "id": new_id("chatcmpl", body.request_id),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = LogprobsWriter(
            service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )

    def answer(self, result: TurnResult) -> dict[str, Any]:
        """The response of a request that does not stream."""
        choices = [self._choice(index, answer) for index, answer in enumerate(result.answers)]
        answer: dict[str, Any] = {
            **self._head,
            "choices": choices,
            "usage": self.turn.usage.openai(),
            "system_fingerprint": None,
        }
        prompt = self.turn.request.prompt
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._logprobs.prompt(prompt, result.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = prompt
        return answer

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._echo() + answer.text,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning
        if answer.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": answer.finished.reason,
            "stop_reason": answer.finished.stop,
        }
        if self._body.logprobs:
            choice["logprobs"] = self._logprobs.chat(answer.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            choice["token_ids"] = answer.ids
        return choice

    def _echo(self) -> str:
        """An assistant's last message, where the body asks for it in front of the answer."""
        last = self._body.messages[-1]
        content = last.get("content")
        echoes = self._body.echo and last.get("role") == "assistant"
        return content if echoes and isinstance(content, str) else ""

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The events of a request that streams; those of one step in one piece."""
        options = self._body.stream_options
        usage_at_end = options is not None and bool(options.include_usage)
        usage_always = usage_at_end and bool(options and options.continuous_usage_stats)
        # What stands before and after the choice in every event.
        before = b"data: " + json_text.encode(self._head)[:-1] + b',"choices":['
        after = b'],"usage":null}\n\n' if usage_at_end else b"]}\n\n"
        started = [False] * self.turn.request.params.n
        updates = self.turn.updates(self._service.dispatcher)
        try:
            async for batch in updates:
                pieces: list[bytes] = []
                if usage_always:
                    usage = json_text.encode(self.turn.usage.openai())
                    after = b'],"usage":' + usage + b"}\n\n"
                for update in batch:
                    if not started[update.choice]:
                        started[update.choice] = True
                        pieces += (before, self._first(update.choice), after)
                    for choice in self._choice_chunks(update):
                        pieces += (before, choice, after)
                if pieces:
                    yield b"".join(pieces)
        finally:
            await updates.aclose()
        last = DONE
        if usage_at_end:
            usage = json_text.encode(self.turn.usage.openai())
            last = before + b'],"usage":' + usage + b"}\n\n" + last
        yield last

    def _first(self, choice: int) -> bytes:
        """The chunk of a choice that comes before all others."""
        chunk: dict[str, Any] = {
            "index": choice,
            "delta": {"role": "assistant", "content": self._echo()},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = self.turn.request.prompt
        return json_text.encode(chunk)

    def _choice_chunks(self, update: Update) -> list[bytes]:
        """`choices[0]` of the chunks that tell of an update."""
        deltas = [_delta(event) for event in update.events if type(event) is not ToolCallEnd]
        extra = self._extra(update)
        if not extra and len(update.events) == 1 and type(update.events[0]) is TextDelta:
            chunks = [_text_chunk(update.choice, update.events[0].text)]
        else:
            if extra and not deltas:
                deltas = [{}]
            chunks = []
            for delta in deltas:
                chunk = {"index": update.choice, "delta": delta, "logprobs": None}
                chunks.append(json_text.encode({**chunk, "finish_reason": None, **extra}))
                extra = {}
        if update.finished is not None:
            last = {
                "index": update.choice,
                "delta": {},
                "logprobs": None,
                "finish_reason": update.finished.reason,
                "stop_reason": update.finished.stop,
            }
            chunks.append(json_text.encode(last))
        return chunks

    def _extra(self, update: Update) -> dict[str, Any]:
        """What goes with the first chunk of an update beside its delta."""
        extra: dict[str, Any] = {}
        if self._body.logprobs and update.output.logprobs:
            top = self._body.top_logprobs or 0
            extra["logprobs"] = self._logprobs.chat(update.output.logprobs, top)
        if self._body.return_token_ids and update.output.ids:
            extra["token_ids"] = update.output.ids
        return extra


def _text_chunk(choice: int, text: str) -> bytes:
    return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
        choice,
        json_text.encode(text),
    )


def _delta(event: Event) -> dict[str, Any]:
    """A chunk's `delta` for an event."""
    match event:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call: dict[str, Any] = {"index": index, "id": call_id, "type": "function"}
            return {"tool_calls": [{**call, "function": function}]}
        case ToolCallDelta(index, arguments):
            return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
        case ToolCallEnd():
            raise AssertionError("no chunk tells of a call's end")
