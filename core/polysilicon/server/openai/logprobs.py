"""Log-probabilities in the forms of chat completions and completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from polysilicon.request import TokenLogprobs
from polysilicon.tokenizer import Tokenizer

LOWEST = -9999.0
"""Written for minus infinity, which JSON lacks."""


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobsWriter:
    """as_ids: tokens are written `token_id:123` (vLLM's return_tokens_as_token_ids)."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def token(self, token_id: int) -> str:
        """A token as text; bytes that are not UTF-8 become U+FFFD."""
        return f"token_id:{token_id}" if self.as_ids else self.tokenizer.token_text(token_id)

    def chat(self, entries: Iterable[TokenLogprobs], top: int) -> dict[str, Any]:
        """`logprobs` of a chat completion's choice."""
        content = [
            {
                **self._chat_token(entry.id, entry.logprob),
                "top_logprobs": [self._chat_token(*pair) for pair in entry.top[:top]],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.token(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }

    def prompt(
        self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: nothing for the first token, then by id. `rank` stands where
        the token is among the likeliest that were asked for."""
        result: list[dict[str, Any] | None] = [None] if prompt else []
        for entry in entries:
            ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
            result.append(
                {
                    str(token_id): {
                        "logprob": max(logprob, LOWEST),
                        "rank": ranks.get(token_id),
                        "decoded_token": self.tokenizer.token_text(token_id),
                    }
                    for token_id, logprob in dict([(entry.id, entry.logprob), *entry.top]).items()
                }
            )
        return result


class CompletionLogprobs:
    """`logprobs` of one completion choice, as its tokens come. hidden: tokens that are not in the
    text."""

    def __init__(self, writer: LogprobsWriter, hidden: frozenset[int]) -> None:
        self._writer = writer
        self._hidden = hidden
        self._offset = 0

    def write(self, tokens: Iterable[tuple[int, TokenLogprobs | None]]) -> dict[str, list[Any]]:
        """The lists for further tokens, each with its log-probabilities if it has them."""
        names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        lists: dict[str, list[Any]] = {name: [] for name in names}
        for token_id, entry in tokens:
            lists["text_offset"].append(self._offset)
            lists["tokens"].append(self._writer.token(token_id))
            lists["token_logprobs"].append(None if entry is None else max(entry.logprob, LOWEST))
            lists["top_logprobs"].append(None if entry is None else self._top(entry))
            if token_id not in self._hidden:
                self._offset += len(self._writer.tokenizer.token_text(token_id))
        return lists

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By token text, likeliest first; of tokens with one text the likelier counts."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.id, entry.logprob)):
            top.setdefault(self._writer.token(token_id), max(logprob, LOWEST))
        return top
