"""What the clients of serve_soak.py ask, and the answers, which an engine alone gives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polysilicon.chat import ChatTemplate
from polysilicon.config import Config
from polysilicon.engine.loading import Loaded, load
from polysilicon.request import FinishReason, Grammar, Request, SamplingParams

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "List three colours:",
    "Water boils at",
    "Ein Satz auf Deutsch: ",
    "1, 2, 3, 4,",
    "The quick brown fox " * 20,
)
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One choice. logprobs: of its tokens, where they were asked for."""

    ids: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A request whose answer is known. params: in the names of SamplingParams."""

    prompt: str
    chat: bool
    params: Mapping[str, Any]
    grammar: Grammar | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, *, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {**self.params, "stream": stream, "return_token_ids": True}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
            if "logprobs" in body:
                body["top_logprobs"], body["logprobs"] = body["logprobs"], True
        else:
            body["prompt"] = self.prompt
        if self.grammar is not None and self.grammar.kind == "json_schema":
            schema = {"name": "answer", "schema": json.loads(self.grammar.text)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.grammar is not None:
            body["structured_outputs"] = {self.grammar.kind: self.grammar.text}
        return body

    def request(self, loaded: Loaded, template: ChatTemplate) -> Request:
        text = self.prompt
        if self.chat:
            text = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
        ids = loaded.tokenizer.encode(text, add_special=not self.chat, parse_special=True)
        params = dict(self.params)
        params["stop"] = tuple(params.get("stop", ()))
        return Request(
            id="offline", prompt=tuple(ids), params=SamplingParams(**params), grammar=self.grammar
        )


def questions() -> list[Question]:
    """The pool: every prompt in several ways."""
    found = []
    ways: list[tuple[dict[str, Any], Grammar | None]] = [
        ({"max_tokens": 24}, None),
        ({"max_tokens": 20, "n": 3}, None),
        ({"max_tokens": 40, "stop": [",", " the", "\n\n"]}, None),
        ({"max_tokens": 16, "logprobs": 3}, None),
        ({"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7, "n": 2}, None),
        ({"max_tokens": 64}, Grammar(kind="json_schema", text=PERSON)),
        ({"max_tokens": 24}, Grammar(kind="regex", text="[a-z]{3,8}( [a-z]{2,9}){1,3}[.]")),
        ({"max_tokens": 80, "ignore_eos": True}, None),
    ]
    for place, prompt in enumerate(PROMPTS):
        for offset in range(3):
            params, grammar = ways[(3 * place + offset) % len(ways)]
            params = {"temperature": 0.0, **params}
            chat = (place + offset) % 2 == 1
            found.append(Question(prompt=prompt, chat=chat, params=params, grammar=grammar))
    return found


def offline(config: Config, path: Path, pool: Sequence[Question]) -> list[list[Answer]]:
    """What the engine answers to each question alone."""
    loaded = load(config, path)
    try:
        template = ChatTemplate.for_tokenizer(loaded.tokenizer)
        answers = []
        for question in pool:
            request = question.request(loaded, template)
            gathered = [Gathered() for _ in range(request.params.n)]
            for output in loaded.client.generate([request]):
                choice = gathered[output.choice]
                choice.ids += output.ids
                choice.text += output.text
                choice.logprobs += [entry.logprob for entry in output.logprobs]
                if output.finish_reason is FinishReason.ERROR:
                    raise SystemExit(f"offline: {output.error}")
                choice.reason = output.finish_reason or choice.reason
            answers.append([choice.answer() for choice in gathered])
        return answers
    finally:
        loaded.client.close()
        loaded.checkpoint.close()


@dataclasses.dataclass
class Gathered:
    """One choice as it comes."""

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[float] = dataclasses.field(default_factory=list)
    reason: str = ""

    def answer(self) -> Answer:
        return Answer(
            ids=tuple(self.ids),
            text=self.text,
            reason=str(self.reason),
            logprobs=tuple(self.logprobs),
        )

    def take(self, choice: Mapping[str, Any], chat: bool) -> None:
        """Add a choice of a response, or of a chunk of one."""
        if chat:
            part = choice.get("message") or choice.get("delta") or {}
            self.text += part.get("content") or ""
        else:
            self.text += choice["text"]
        self.ids += choice.get("token_ids") or ()
        logprobs = choice.get("logprobs")
        if logprobs and chat:
            self.logprobs += [entry["logprob"] for entry in logprobs["content"]]
        elif logprobs:
            self.logprobs += logprobs["token_logprobs"]
        self.reason = choice.get("finish_reason") or self.reason
