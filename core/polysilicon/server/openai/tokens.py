"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from polysilicon.server import json_text
from polysilicon.server.bodies import openapi_body, read_body
from polysilicon.server.chat_plan import ChatInput, plan_chat
from polysilicon.server.errors import invalid
from polysilicon.server.openai.rendering import tool_use
from polysilicon.server.openai.schemas import DetokenizeBody, Message, TokenizeBody
from polysilicon.server.service import Service


def tokens_router(service: Service) -> APIRouter:
    """The endpoints' routes."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", openapi_extra=openapi_body(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of a chat as the model reads it."""
        body = await read_body(request, TokenizeBody)
        service.model_named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("send either prompt, a text, or messages, a chat", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            ids = await service.prompts.encode(body.prompt, add_special=special)
        else:
            plan = await plan_chat(service, _chat(body, body.messages or []))
            text = plan.text
            special = bool(body.add_special_tokens)
            ids = await service.prompts.encode(text, add_special=special)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": service.max_length,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.token_text(token) for token in ids]
        return json_text.response(answer)

    @router.post("/detokenize", openapi_extra=openapi_body(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, control tokens written out."""
        body = await read_body(request, DetokenizeBody)
        service.model_named(body.model)
        size = service.tokenizer.vocab_size
        if not all(0 <= token < size for token in body.tokens):
            raise invalid(f"tokens: ids must lie in [0, {size}), the vocabulary", "tokens")
        text = await service.prompts.decode(body.tokens)
        return json_text.response({"prompt": text})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What a client needs beside `/tokenize` to build prompts itself, as lm-eval does."""
        tokenizer, template = service.tokenizer, service.dispatcher.chat_template
        ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        return json_text.response(
            {
                **{n: None if i is None else tokenizer.token_text(i) for n, i in ends.items()},
                "add_bos_token": tokenizer.add_bos,
                "add_eos_token": tokenizer.add_eos,
                "chat_template": None if template is None else template.source,
                "model_max_length": service.max_length,
            }
        )

    return router


def _chat(body: TokenizeBody, messages: list[Message]) -> ChatInput:
    return ChatInput(
        messages=messages,
        use=tool_use(body.tools, None, parallel=True),
        extra=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        open_end=body.continue_final_message,
    )
