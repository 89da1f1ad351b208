"""The forms in which completions and embeddings take texts: one or many, as text or token ids."""

from __future__ import annotations

import dataclasses

from polysilicon.server.errors import invalid
from polysilicon.server.service import Service

MOST_PROMPTS = 2048

PromptField = str | list[str] | list[int] | list[list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and its text where it was given as one."""

    ids: tuple[int, ...]
    text: str | None = None


async def prompt_list(
    service: Service, value: PromptField, field: str, add_special: bool, keep: int | None
) -> list[Prompt]:
    """The prompts of a field in order. Raises ApiError (400)."""
    given: list[str | list[int]] = []
    if isinstance(value, str):
        given = [value]
    elif value and isinstance(value[0], int):
        given = [[token for token in value if isinstance(token, int)]]
    else:
        given = [item for item in value if not isinstance(item, int)]
    if not 0 < len(given) <= MOST_PROMPTS:
        raise invalid(f"{field} must hold between 1 and {MOST_PROMPTS} prompts", field)
    vocab_size = service.dispatcher.facts.vocab_size
    prompts = []
    for item in given:
        if isinstance(item, str):
            ids = await service.prompts.encode(item, add_special=add_special)
            prompts.append(Prompt(service.truncated(ids, keep), item))
        else:
            if not all(0 <= token < vocab_size for token in item):
                raise invalid(f"{field}: token ids must lie in [0, {vocab_size})", field)
            prompts.append(Prompt(service.truncated(item, keep)))
        if not prompts[-1].ids:
            raise invalid(f"{field} holds an empty prompt: give at least one token", field)
    return prompts
