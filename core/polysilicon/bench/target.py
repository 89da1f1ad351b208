"""The server under load: where it is, what it is asked, and which form of asking it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import aiohttp
import msgspec

from polysilicon.bench.events import error_text
from polysilicon.bench.records import Record
from polysilicon.bench.settings import Endpoint, PromptForm
from polysilicon.bench.stream import describe, read_bounded, stream
from polysilicon.bench.workloads import Ids, Item, SyntheticPrompt, Text
from polysilicon.errors import PolysiliconError

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_PROBE_TOKENS = 24
_FEW_IDS, _MANY_IDS = 1000, 32000
"""Below the first, many vocabularies keep special tokens; below the second nearly all have ids."""


class ServerError(PolysiliconError):
    """The server cannot be reached, or does not answer as an OpenAI-compatible one does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """How requests are put to one server.

    url: without path. optional: fields beyond the plain ones that the server takes. extra: fields
    of the user's own.
    """

    url: str
    model: str
    endpoint: Endpoint
    prompts: Ids | Text
    optional: Mapping[str, Any]
    extra: Mapping[str, Any]

    @property
    def address(self) -> str:
        return self.url + _PATHS[self.endpoint]

    def form_of(self, items: Sequence[Item]) -> Literal["ids", "text", "recorded"]:
        """How the prompts of a workload are put: as token ids, as words in their place, or as the
        texts that they are."""
        if all(isinstance(item.prompt, str) for item in items):
            return "recorded"
        return "ids" if isinstance(self.prompts, Ids) else "text"

    def body(self, item: Item) -> bytes:
        """The JSON body that asks for an item."""
        prompt: str | list[int]
        if isinstance(item.prompt, SyntheticPrompt):
            prompt = self.prompts.render(item.prompt.units())
        else:
            prompt = item.prompt
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        fields |= {"max_tokens": item.output_tokens, "temperature": 0.0, "stream": True}
        return msgspec.json.encode(fields | dict(self.optional) | dict(self.extra))


async def find_target(
    session: aiohttp.ClientSession,
    *,
    url: str,
    model: str | None,
    endpoint: Endpoint,
    prompt_form: PromptForm,
    vocab_size: int | None,
    extra: Mapping[str, Any],
) -> Target:
    """Ask the server what it serves, then try requests from the fullest form to the plainest.

    The forms differ in prompts as token ids or as text, and in the fields that not every server
    knows: usage in the last chunk, and going on past the end-of-sequence token. Raises ServerError
    with the server's own words when none is answered.
    """
    models = await _models(session, url, needed=model is None)
    chosen = next((entry for entry in models if entry.id == model), models[0] if models else None)
    if model is None:
        assert chosen is not None
        model = chosen.id
    if vocab_size is None and chosen is not None and chosen.meta is not None:
        vocab_size = chosen.meta.n_vocab
    high = vocab_size or _MANY_IDS
    ids = Ids(low=min(_FEW_IDS, high // 4), high=high)
    forms: list[Ids | Text] = [Text()]
    if endpoint == "completions" and prompt_form != "text":
        forms = [ids] if prompt_form == "ids" else [ids, Text()]
    fullest: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    options = [fullest, {"stream_options": fullest["stream_options"]}, {"ignore_eos": True}, {}]
    said = ""
    for prompts in forms:
        for optional in options:
            target = Target(
                url=url,
                model=model,
                endpoint=endpoint,
                prompts=prompts,
                optional=optional,
                extra=extra,
            )
            record = await _probe(session, target)
            if record.failure is None and _understood(record, prompts):
                return target
            if record.failure is None:
                said = f"{_PROBE_TOKENS} token ids were taken for {record.prompt_tokens} tokens"
                break
            said = f"{record.failure.cause}: {record.failure.message}"
            if record.failure.cause not in _REFUSALS:
                raise ServerError(f"{target.address} cannot be measured: {said}")
    hint = " (is --vocab-size right?)" if forms == [ids] else ""
    raise ServerError(f"{url}{_PATHS[endpoint]} refuses every form of request: {said}{hint}")


_REFUSALS = {"HTTP 400", "HTTP 422", "HTTP 500", "HTTP 501"}
"""Answers by which servers tell that they do not know a field or a form of prompt."""


def _understood(record: Record, prompts: Ids | Text) -> bool:
    """Whether token ids were read as such, as far as the server's own count tells."""
    if isinstance(prompts, Text) or not record.counted:
        return True
    return _PROBE_TOKENS <= record.prompt_tokens <= _PROBE_TOKENS + 1


async def _probe(session: aiohttp.ClientSession, target: Target) -> Record:
    prompt = SyntheticPrompt(seed=0, segments=(((0,), _PROBE_TOKENS),))
    record = Record(prompt_tokens=prompt.length)
    body = target.body(Item(prompt=prompt, output_tokens=2))
    await stream(record, session, target.address, body)
    return record


class _Meta(msgspec.Struct):
    n_vocab: int | None = None


class _Model(msgspec.Struct):
    id: str
    meta: _Meta | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def _models(session: aiohttp.ClientSession, url: str, *, needed: bool) -> list[_Model]:
    """What the server lists; empty where it lists nothing and that is not needed."""
    address = f"{url}/v1/models"
    try:
        async with session.get(address) as response:
            body = await read_bounded(response.content)
            status = response.status
    except (aiohttp.ClientError, OSError, ValueError) as error:
        failure = describe(error)
        raise ServerError(
            f"{url} cannot be reached: {failure.cause}: {failure.message}. Start the server, or "
            "mend --url"
        ) from None
    if status in (401, 403):
        raise ServerError(
            f"{address} answers HTTP {status}: {error_text(body)}. Give the key with --api-key"
        )
    try:
        models = msgspec.json.decode(body, type=_Models).data if status == 200 else []
    except msgspec.DecodeError:
        models = []
    if not models and needed:
        raise ServerError(
            f"{address} lists no model (HTTP {status}): is --url an OpenAI-compatible server? If "
            "so, name the model with --model"
        )
    return models
