"""`POST /v1/responses`, without state: nothing is stored and nothing is looked up."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from polysilicon.request import Grammar
from polysilicon.server import json_text
from polysilicon.server.bodies import openapi_body, read_body
from polysilicon.server.chat_plan import plan_chat
from polysilicon.server.connection import EventStream, connected
from polysilicon.server.errors import ApiError, invalid
from polysilicon.server.events import Finished, Update
from polysilicon.server.openai.logprobs import LogprobsWriter
from polysilicon.server.openai.responses_input import chat_input, flat_tools
from polysilicon.server.openai.responses_items import OutputItems
from polysilicon.server.openai.responses_schema import ResponsesBody, TextOptions
from polysilicon.server.openai.sampling import engine_fields, sampling_params
from polysilicon.server.service import Service, new_id
from polysilicon.server.turns import ChatTurn, chat_turn


def responses_router(service: Service) -> APIRouter:
    """The endpoint's route."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/responses", openapi_extra=openapi_body(ResponsesBody))
    async def responses(request: Request) -> Response:
        """Answer a list of items."""
        body = await read_body(request, ResponsesBody)
        seconds = service.settings.request_timeout
        if body.stream:
            answer = await _prepare(service, body)
            return EventStream(answer.events(), seconds=seconds, failure=answer.failure)
        async with connected(request.receive, seconds):
            answer = await _prepare(service, body)
            return json_text.response(await answer.whole())

    return router


async def _prepare(service: Service, body: ResponsesBody) -> _Answer:
    """Check a body and render it. Raises ApiError, RequestError and TemplateError."""
    model = service.model_named(body.model)
    if (body.n or 1) != 1:
        raise invalid("n is not supported here: a response has one answer", "n")
    if body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs is not supported here", "prompt_logprobs")
    wanted = "message.output_text.logprobs" in (body.include or ()) or body.top_logprobs
    params = sampling_params(
        service,
        body,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wanted else None,
    )
    fields = engine_fields(body)
    if (grammar := _grammar(body.text)) is not None:
        if fields["grammar"] is not None:
            raise invalid("text.format and another field say what the output must be: send one")
        fields["grammar"] = grammar
    plan = await plan_chat(service, chat_input(body))
    turn = await chat_turn(service, plan, params, keep=body.truncate_prompt_tokens, **fields)
    return _Answer(service, body, turn, model)


def _grammar(text: TextOptions | None) -> Grammar | None:
    form = None if text is None else text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar(kind="json_object")
    if form.json_schema is None:
        raise invalid("text.format of type json_schema needs schema", "text.format.schema")
    return Grammar(kind="json_schema", text=json.dumps(form.json_schema))


class _Answer:
    """One response in OpenAI's wire format."""

    def __init__(self, service: Service, body: ResponsesBody, turn: ChatTurn, model: str) -> None:
        self._service = service
        self._body = body
        self._turn = turn
        self._items = OutputItems()
        self._finished = Finished("stop")
        self._logprobs = LogprobsWriter(
            service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        )
        params = turn.request.params
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        self._head = {
            "id": new_id("resp", body.request_id),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning and body.reasoning.effort,
                "summary": None,
            },
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": body.tool_choice or "auto",
            "tools": flat_tools(body.tools),
            "top_logprobs": body.top_logprobs,
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    async def whole(self) -> dict[str, Any]:
        """Run the turn; the response of a request that does not stream."""
        updates = self._turn.updates(self._service.dispatcher)
        try:
            async for batch in updates:
                for update in batch:
                    self._take(update)
        finally:
            await updates.aclose()
        complete = self._finished.reason != "length"
        self._items.finish(complete=complete)
        return self._response("completed" if complete else "incomplete")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a request that streams; those of one step in one piece."""
        items = self._items
        begun = False
        updates = self._turn.updates(self._service.dispatcher)
        try:
            async for batch in updates:
                pieces: list[bytes] = []
                if not begun:
                    begun = True
                    empty = self._response("in_progress")
                    pieces.append(items.event("response.created", response=empty))
                    pieces.append(items.event("response.in_progress", response=empty))
                for update in batch:
                    pieces += self._take(update)
                if pieces:
                    yield b"".join(pieces)
        finally:
            await updates.aclose()
        complete = self._finished.reason != "length"
        last = items.finish(complete=complete)
        status = "completed" if complete else "incomplete"
        last.append(items.event(f"response.{status}", response=self._response(status)))
        yield b"".join(last)

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": str(error)}
        return self._items.event("response.failed", response=response)

    def _take(self, update: Update) -> list[bytes]:
        self._finished = update.finished or self._finished
        logprobs = []
        if update.output.logprobs:
            top = self._body.top_logprobs or 0
            logprobs = self._logprobs.chat(update.output.logprobs, top)["content"]
        return self._items.take(update.events, logprobs)

    def _response(self, status: str) -> dict[str, Any]:
        usage = self._turn.usage
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "output": self._items.items,
            "usage": None
            if status == "in_progress"
            else {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
