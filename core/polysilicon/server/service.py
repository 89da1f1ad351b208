"""What every endpoint needs: the dispatcher with the server's settings, and common checks."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from polysilicon.request import SLO, Grammar, Request, SamplingParams
from polysilicon.server.dispatcher import Dispatcher
from polysilicon.server.errors import ApiError, invalid
from polysilicon.server.parsing.formats import chat_format
from polysilicon.server.prompts import Prompts
from polysilicon.server.settings import Settings

_MOST_STOPS = 256
_MOST_STOP_CHARACTERS = 16_384


class Service:
    """One model as the HTTP endpoints see it."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self.dispatcher = dispatcher
        self.settings = settings
        self.tokenizer = dispatcher.tokenizer
        self.started = int(time.time())
        self.prompts = Prompts(
            tokenizer=dispatcher.tokenizer,
            template=dispatcher.chat_template,
            no_chat=dispatcher.no_chat,
            max_length=lambda: self.max_length,
        )
        template = dispatcher.chat_template
        self.chat_format = chat_format(
            "" if template is None else template.source, dispatcher.tokenizer
        )
        self.sampling_defaults: dict[str, Any] = {
            **dispatcher.sampling_defaults,
            **settings.sampling,
        }

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""
        return self.dispatcher.facts.max_length

    @property
    def model_name(self) -> str:
        """The name that stands in answers."""
        return self.settings.model_names[0]

    def model_named(self, name: str | None) -> str:
        """The name for an answer to a request that gave `name`. Raises ApiError (404)."""
        if not name:
            return self.model_name
        if name in self.settings.model_names:
            return name
        names = ", ".join(self.settings.model_names)
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist: this server has {names}",
            param="model",
            code="model_not_found",
        )

    def truncated(self, prompt: Sequence[int], keep: int | None) -> tuple[int, ...]:
        """The prompt's last `keep` tokens (vLLM's truncate_prompt_tokens): -1 for as many as the
        context holds with one to come, None for all. Raises ApiError (400)."""
        if keep is None:
            return tuple(prompt)
        if keep < -1 or keep == 0 or keep > self.max_length:
            raise invalid(
                f"truncate_prompt_tokens must be -1 or lie between 1 and {self.max_length}",
                "truncate_prompt_tokens",
            )
        return tuple(prompt[-(self.max_length - 1 if keep == -1 else keep) :])

    def request(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        *,
        salt: str | None = None,
        priority: int = 0,
        slo: SLO | None = None,
        grammar: Grammar | None = None,
    ) -> Request:
        """A request as the engine takes it. Raises ApiError (400) for one that does not fit."""
        self.check_length(prompt, params)
        return Request(
            id=new_id("request"),
            prompt=prompt,
            params=params,
            salt=salt,
            priority=priority,
            slo=slo,
            grammar=grammar,
        )

    def check_length(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse what cannot fit into the context. Raises ApiError (400)."""
        if not prompt:
            raise invalid("the prompt is empty: give at least one token", "prompt")
        length = len(prompt)
        asked = params.max_tokens
        room = self.max_length - length
        if asked is None and room < 1:
            raise self._too_long(f"the prompt has {length} tokens, and at least one must follow")
        if asked is not None and asked > room:
            raise self._too_long(
                f"{length + asked} tokens are asked for, {length} of the prompt and {asked} to come"
            )

    def _too_long(self, what: str) -> ApiError:
        return invalid(
            f"the context is {self.max_length} tokens, but {what}: shorten the prompt or lower "
            "max_tokens",
            code="context_length_exceeded",
        )


def stop_texts(stops: Sequence[str], field: str) -> tuple[str, ...]:
    """The stop texts of a request's field; empty ones ask for nothing. Raises ApiError (400)."""
    if len(stops) > _MOST_STOPS or sum(map(len, stops)) > _MOST_STOP_CHARACTERS:
        raise invalid(
            f"{field} holds more than {_MOST_STOPS} texts, or more than {_MOST_STOP_CHARACTERS:,} "
            "characters: send fewer, shorter ones",
            field,
        )
    return tuple(filter(None, stops))


def new_id(prefix: str, given: str | None = None) -> str:
    """The id of an answer: random, or with the one that the client gave."""
    return f"{prefix}-{given or secrets.token_hex(16)}"


@dataclasses.dataclass(slots=True)
class Usage:
    """Tokens of one answer, counted as they come."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def openai(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage
