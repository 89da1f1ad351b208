"""Bodies that are wrong in very many places cost no more than those that are wrong in one."""

from __future__ import annotations

import time

import pytest

from polysilicon.server.anthropic.schemas import CountTokensBody, MessagesBody
from polysilicon.server.bodies import checked
from polysilicon.server.errors import ApiError
from polysilicon.server.openai.responses_schema import ResponsesBody
from polysilicon.server.openai.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)

MANY = 100_000
KINDS = (
    ChatBody, CompletionBody, EmbeddingBody, TokenizeBody, DetokenizeBody, ResponsesBody,
    MessagesBody, CountTokensBody,
)  # fmt: skip
GOOD = {
    "messages": [{"role": "user", "content": "a"}],
    "prompt": "a",
    "input": "a",
    "tokens": [1],
    "max_tokens": 1,
}


def good(kind) -> dict[str, object]:
    return {name: value for name, value in GOOD.items() if name in kind.model_fields}


@pytest.mark.parametrize("kind", KINDS)
def test_many_faults(kind) -> None:
    assert checked(kind, good(kind))
    many = (
        [None] * MANY,
        [1] * MANY + ["a"],
        [[1] * MANY + ["a"]],
        dict.fromkeys(map(str, range(MANY)), "x"),
        [{"role": "user", "content": [1] * MANY}],
    )
    refused = []
    began = time.monotonic()
    for name in kind.model_fields:
        for value in many:
            try:
                checked(kind, good(kind) | {name: value})
            except ApiError as error:
                refused.append(error)
    assert len(refused) > len(kind.model_fields)
    assert {error.status for error in refused} == {400}
    assert max(len(str(error)) for error in refused) < 1000
    # A watchdog: an error for every fault would take minutes.
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("kind", KINDS)
def test_many_unknown_fields(kind) -> None:
    with pytest.raises(ApiError, match="unknown fields"):
        checked(kind, good(kind) | {f"field {n}": n for n in range(MANY)})
