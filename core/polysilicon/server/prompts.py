"""Prompts as token ids: texts encoded and chats rendered without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from polysilicon.chat import ChatTemplate
from polysilicon.server.errors import invalid
from polysilicon.tokenizer import Tokenizer

_SHORT = 1024
"""Characters or tokens that are taken on the event loop: changing to a thread would take longer."""

Result = TypeVar("Result")


class Prompts:
    """Makes the prompts of one model. max_length: gives the most tokens of a sequence."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        no_chat: str,
        max_length: Callable[[], int],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._no_chat = no_chat
        self._max_length = max_length
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="prompts")

    async def encode(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """Token ids of a text, control tokens that are written out read as such.

        Raises ApiError (400) for a text that no context could hold, without encoding it."""
        max_length = self._max_length()
        if len(text) > max_length and len(text) > (max_length + 2) * self._longest_token:
            raise invalid(
                f"the prompt has {len(text):,} characters, which cannot fit into the context of "
                f"{max_length:,} tokens: shorten it",
                code="context_length_exceeded",
            )

        def work() -> tuple[int, ...]:
            return tuple(self._tokenizer.encode(text, add_special=add_special, parse_special=True))

        return work() if len(text) <= _SHORT else await self._in_thread(work)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens written out."""

        def work() -> str:
            return self._tokenizer.decode(ids, skip_special=False)

        return work() if len(ids) <= _SHORT else await self._in_thread(work)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises ApiError (400) for a model that cannot chat, and
        TemplateError."""
        template = self._template
        if template is None:
            raise invalid(self._no_chat)

        def work() -> str:
            return template.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                extra=extra,
            )

        return await self._in_thread(work)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes of the longest token."""
        tokenizer = self._tokenizer
        return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
