"""`POST /v1/completions`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from polysilicon.request import FinishReason, RequestOutput, TokenLogprobs
from polysilicon.request import Request as EngineRequest
from polysilicon.server import json_text
from polysilicon.server.bodies import openapi_body, read_body
from polysilicon.server.connection import EventStream, connected
from polysilicon.server.dispatcher import RequestStream
from polysilicon.server.errors import invalid
from polysilicon.server.openai.failures import DONE, failure_event
from polysilicon.server.openai.logprobs import CompletionLogprobs, LogprobsWriter
from polysilicon.server.openai.prompt_lists import prompt_list
from polysilicon.server.openai.sampling import engine_fields, sampling_params
from polysilicon.server.openai.schemas import CompletionBody
from polysilicon.server.service import Service, Usage, new_id
from polysilicon.server.turns import check_output, merged, stop_of


def completions_router(service: Service) -> APIRouter:
    """The endpoint's route."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", openapi_extra=openapi_body(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        body = await read_body(request, CompletionBody)
        seconds = service.settings.request_timeout
        if body.stream:
            completion = await _prepare(service, body)
            return EventStream(completion.chunks(), seconds=seconds, failure=failure_event)
        async with connected(request.receive, seconds):
            completion = await _prepare(service, body)
            return json_text.response(await completion.answer())

    return router


async def _prepare(service: Service, body: CompletionBody) -> _Completion:
    """Check a body and encode its prompts. Raises ApiError and RequestError."""
    model = service.model_named(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(
            "best_of is not supported: ask for n choices and take the best yourself",
            "best_of",
            "unsupported_parameter",
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: send both", "stream_options")
    params = sampling_params(service, body, max_tokens=body.max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        params = dataclasses.replace(params, prompt_logprobs=body.logprobs)
    prompts = await prompt_list(
        service, body.prompt, "prompt", body.add_special_tokens, body.truncate_prompt_tokens
    )
    fields = engine_fields(body)
    sources = [
        _Source(service.request(prompt.ids, params, **fields), prompt.text) for prompt in prompts
    ]
    return _Completion(service, body, sources, model)


@dataclasses.dataclass(slots=True)
class _Source:
    """A prompt on its way. text: as it was given. logprobs: of its tokens, once they are known."""

    request: EngineRequest
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class _Choice:
    """One choice of one prompt as it comes."""

    def __init__(self, service: Service, body: CompletionBody, source: _Source, index: int) -> None:
        self.source = source
        self.index = index
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: dict[str, list[Any]] | None = None
        self.finish_reason: str | None = None
        self.stop: str | int | None = None
        self._started = False
        self._body = body
        self._tokenizer = service.tokenizer
        params = source.request.params
        self._hidden = service.tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._writer: CompletionLogprobs | None = None
        if body.logprobs is not None:
            tokens = LogprobsWriter(service.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
            self._writer = CompletionLogprobs(tokens, self._hidden)

    def take(self, output: RequestOutput) -> tuple[str, dict[str, list[Any]] | None]:
        """The text and log-probabilities of news, with the prompt's before the first where it is
        echoed. Raises ApiError when the engine broke off."""
        check_output(output)
        self.source.logprobs = self.source.logprobs or output.prompt_logprobs
        echoes = self._body.echo and not self._started
        self._started = True
        text = self._echo() + output.text if echoes else output.text
        logprobs = None
        if self._writer is not None:
            prompt = self._scored_prompt() if echoes else []
            scored = [(entry.id, entry) for entry in output.logprobs]
            logprobs = self._writer.write([*prompt, *scored])
        if output.finish_reason is not None:
            length = output.finish_reason is FinishReason.LENGTH
            self.finish_reason = "length" if length else "stop"
            self.stop = stop_of(self.source.request, output, self._tokenizer.eos_ids)
        return text, logprobs

    def keep(self, output: RequestOutput) -> None:
        """Take news and add them to what came before."""
        text, logprobs = self.take(output)
        self.text += text
        self.ids += output.ids
        if self.logprobs is None:
            self.logprobs = logprobs
        elif logprobs is not None:
            for name, values in logprobs.items():
                self.logprobs[name] += values

    def _echo(self) -> str:
        if self.source.text is not None:
            return self.source.text
        hide = bool(self._hidden)
        return self._tokenizer.decode(self.source.request.prompt, skip_special=hide)

    def _scored_prompt(self) -> list[tuple[int, TokenLogprobs | None]]:
        prompt = self.source.request.prompt
        scores: list[TokenLogprobs | None] = [None, *self.source.logprobs]
        scores += [None] * (len(prompt) - len(scores))
        return list(zip(prompt, scores, strict=True))


class _Completion:
    """Completions in OpenAI's wire format."""

    def __init__(
        self, service: Service, body: CompletionBody, sources: Sequence[_Source], model: str
    ) -> None:
        self._service = service
        self._body = body
        self._sources = sources
        self._n = n = sources[0].request.params.n
        self._choices = [
            _Choice(service, body, source, place * n + index)
            for place, source in enumerate(sources)
            for index in range(n)
        ]
        self._usage = Usage(sum(len(source.request.prompt) for source in sources))
        self._cached = [0] * len(sources)
        self._head = {
            "id": new_id("cmpl", body.request_id),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def answer(self) -> dict[str, Any]:
        """Run the requests; the response of one that does not stream."""
        async with contextlib.aclosing(self._news()) as news:
            async for batch in news:
                for choice, output in batch:
                    choice.keep(output)
        return {
            **self._head,
            "choices": [self._whole(choice) for choice in self._choices],
            "usage": self._usage.openai(),
            "system_fingerprint": None,
        }

    def _whole(self, choice: _Choice) -> dict[str, Any]:
        whole: dict[str, Any] = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop,
        }
        prompt = choice.source.request.prompt
        if self._body.prompt_logprobs is not None:
            writer = LogprobsWriter(self._service.tokenizer)
            whole["prompt_logprobs"] = writer.prompt(prompt, choice.source.logprobs)
        if self._body.return_token_ids:
            whole["token_ids"], whole["prompt_token_ids"] = choice.ids, prompt
        return whole

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The events of a request that streams; those of one step in one piece."""
        options = self._body.stream_options
        usage_at_end = options is not None and bool(options.include_usage)
        usage_always = usage_at_end and bool(options and options.continuous_usage_stats)
        # What stands before and after the choice in every event.
        before = b"data: " + json_text.encode(self._head)[:-1] + b',"choices":['
        after = b'],"usage":null}\n\n' if usage_at_end else b"]}\n\n"
        started: set[int] = set()
        async with contextlib.aclosing(self._news()) as news:
            async for batch in news:
                pieces: list[bytes] = []
                if usage_always:
                    usage = json_text.encode(self._usage.openai())
                    after = b'],"usage":' + usage + b"}\n\n"
                for choice, output in batch:
                    chunk = self._chunk(choice, output, choice.index not in started)
                    started.add(choice.index)
                    if chunk:
                        pieces += (before, chunk, after)
                if pieces:
                    yield b"".join(pieces)
        last = DONE
        if usage_at_end:
            usage = json_text.encode(self._usage.openai())
            last = before + b'],"usage":' + usage + b"}\n\n" + DONE
        yield last

    def _chunk(self, choice: _Choice, output: RequestOutput, first: bool) -> bytes:
        """`choices[0]` of the chunk that tells of news; nothing for news without any."""
        text, logprobs = choice.take(output)
        if logprobs is not None and not logprobs["tokens"]:
            logprobs = None
        if logprobs is None and choice.finish_reason is None and not self._body.return_token_ids:
            if not text:
                return b""
            return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (
                choice.index,
                json_text.encode(text),
            )
        chunk = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop,
        }
        if self._body.return_token_ids:
            chunk["token_ids"] = output.ids
            if first:
                chunk["prompt_token_ids"] = choice.source.request.prompt
        return json_text.encode(chunk)

    async def _news(self) -> AsyncGenerator[list[tuple[_Choice, RequestOutput]], None]:
        """Submit every prompt; news as they come, counted. Closing it cancels the rest."""
        with contextlib.ExitStack() as running:
            streams: list[RequestStream] = [
                running.enter_context(self._service.dispatcher.submit(source.request))
                for source in self._sources
            ]
            async with contextlib.aclosing(merged(streams)) as news:
                async for place, outputs in news:
                    for output in outputs:
                        self._usage.completion_tokens += len(output.ids)
                        cached = output.num_cached_tokens
                        if cached > self._cached[place]:
                            self._usage.cached_tokens += cached - self._cached[place]
                            self._cached[place] = cached
                    yield [(self._choices[place * self._n + o.choice], o) for o in outputs]
