"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from polysilicon.request import SamplingParams
from polysilicon.server import json_text
from polysilicon.server.anthropic.blocks import Blocks, event
from polysilicon.server.anthropic.conversion import chat_input, grammar_of
from polysilicon.server.anthropic.failures import failure_event
from polysilicon.server.anthropic.schemas import CountTokensBody, MessagesBody
from polysilicon.server.bodies import openapi_body, read_body
from polysilicon.server.chat_plan import plan_chat
from polysilicon.server.connection import EventStream, connected
from polysilicon.server.events import Finished
from polysilicon.server.service import Service, Usage, new_id, stop_texts
from polysilicon.server.turns import Answer, ChatTurn, chat_turn, whole_turn

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_router(service: Service) -> APIRouter:
    """The endpoints' routes."""
    router = APIRouter(tags=["anthropic"])

    @router.post("/v1/messages", openapi_extra=openapi_body(MessagesBody))
    async def messages(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, MessagesBody)
        seconds = service.settings.request_timeout
        if body.stream:
            message = await _prepare(service, body)
            return EventStream(message.events(), seconds=seconds, failure=failure_event)
        async with connected(request.receive, seconds):
            message = await _prepare(service, body)
            result = await whole_turn(message.turn, service.dispatcher)
            return json_text.response(message.answer(result.answers[0]))

    @router.post("/v1/messages/count_tokens", openapi_extra=openapi_body(CountTokensBody))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has as a prompt."""
        body = await read_body(request, CountTokensBody)
        service.model_named(body.model)
        plan = await plan_chat(service, chat_input(body))
        ids = await service.prompts.encode(plan.text, add_special=False)
        return json_text.response({"input_tokens": len(ids)})

    return router


async def _prepare(service: Service, body: MessagesBody) -> _Message:
    """Check a body and render it. Raises ApiError, RequestError and TemplateError."""
    model = service.model_named(body.model)
    said = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": stop_texts(body.stop_sequences or (), "stop_sequences"),
    }
    given = {name: value for name, value in said.items() if value is not None}
    params = SamplingParams(**service.sampling_defaults | given | {"max_tokens": body.max_tokens})
    plan = await plan_chat(service, chat_input(body))
    turn = await chat_turn(service, plan, params, grammar=grammar_of(body.output_config))
    return _Message(service, turn, model)


class _Message:
    """One answer in Anthropic's wire format."""

    def __init__(self, service: Service, turn: ChatTurn, model: str) -> None:
        self.turn = turn
        self._service = service
        self._head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": model}

    def answer(self, answer: Answer) -> dict[str, Any]:
        """The response of a request that does not stream."""
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            content.append({"type": "text", "text": answer.text, "citations": None})
        for call in answer.calls:
            content.append(
                {
                    "type": "tool_use",
                    "id": call.id,
                    "name": call.name,
                    "input": _object(call.arguments),
                }
            )
        return {
            **self._head,
            "content": content,
            **_ending(answer.finished, bool(answer.calls)),
            "usage": _usage(self.turn.usage),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a request that streams; those of one step in one piece."""
        blocks = Blocks()
        started = False
        finished = Finished("stop")
        updates = self.turn.updates(self._service.dispatcher)
        try:
            async for batch in updates:
                pieces: list[bytes] = []
                if not started:
                    started = True
                    pieces.append(self._start())
                for update in batch:
                    pieces += blocks.take(update.events)
                    finished = update.finished or finished
                if pieces:
                    yield b"".join(pieces)
        finally:
            await updates.aclose()
        ended = {
            "type": "message_delta",
            "delta": _ending(finished, blocks.called),
            "usage": _usage(self.turn.usage),
        }
        last = [*blocks.finish(), event(ended), event({"type": "message_stop"})]
        yield b"".join(last)

    def _start(self) -> bytes:
        usage = {**_usage(self.turn.usage), "output_tokens": 0}
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return event({"type": "message_start", "message": {**self._head, **empty}})


def _ending(finished: Finished, called: bool) -> dict[str, Any]:
    reason = _REASONS[finished.reason]
    stop = finished.stop if isinstance(finished.stop, str) else None
    if called and finished.reason != "length":
        reason = "tool_use"
    elif stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts the prompt's cached tokens apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments; those that the output's length broke off are not there."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
