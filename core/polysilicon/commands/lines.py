"""`polysilicon tokenize`, `score` and `generate`: a file of JSON lines in, the same lines out."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from polysilicon import progress
from polysilicon.catalogue import resolve_model
from polysilicon.commands.options import configured
from polysilicon.commands.session import ENGINE_FIELDS, session
from polysilicon.config import SAMPLING_FIELDS, Config
from polysilicon.engine.loading import Loaded, load_tokenizer
from polysilicon.errors import ConfigError, RequestError
from polysilicon.generation import command_line_defaults
from polysilicon.request import Grammar, Request, RequestOutput, SamplingParams
from polysilicon.tokenizer import Tokenizer
from polysilicon.weights.checkpoint import open_files

MAX_LINE = 64 << 20

Line = dict[str, Any]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Catalogue name, path or hf:owner/repo[:file].")
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="JSON lines, or - for standard input.")
]


def tokenize(model: ModelArgument, file: FileArgument) -> None:
    """Token ids of texts: lines {"text": ...} in; the same with ids and ids_with_special out."""
    path = resolve_model(model, progress=progress.bar)
    with open_files(path) as files:
        tokenizer = load_tokenizer(files)
    for number, line in read_lines(file):
        text = line.get("text")
        if not isinstance(text, str):
            raise ConfigError(f'{file}, line {number}: needs "text", a string')
        plain = tokenizer.encode(text, add_special=False, parse_special=False)
        special = tokenizer.encode(text, add_special=False, parse_special=True)
        write_line({**line, "ids": plain, "ids_with_special": special})


@configured(ENGINE_FIELDS)
def score(model: ModelArgument, file: FileArgument, config: Config) -> None:
    """Log-probabilities of prompts: lines {"prompt": ...} or {"ids": [...]} in; the same with ids,
    prompt_logprobs and top (20 likeliest next tokens) out."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=20)
    with session(config, model) as loaded:
        lines: list[Line] = []
        prompts: list[list[int]] = []
        for number, line in read_lines(file):
            place = f"{file}, line {number}"
            ids = prompt_ids(line, loaded.tokenizer, place)
            submit(loaded, Request(id=str(len(lines)), prompt=tuple(ids), params=params), place)
            lines.append(line)
            prompts.append(ids)
        waiting = dict(enumerate(zip(lines, prompts, strict=True)))
        failure = None
        for output in _in_order(loaded.client.drain(), len(lines)):
            line, ids = waiting.pop(int(output.request_id))
            failure = failure or output.error
            write_line(
                {
                    **line,
                    "ids": list(ids),
                    "prompt_logprobs": [entry.logprob for entry in output.prompt_logprobs],
                    "top": [list(pair) for pair in output.next_top],
                    **_error(output),
                }
            )
        _check(failure)


@configured(ENGINE_FIELDS | SAMPLING_FIELDS)
def generate(model: ModelArgument, file: FileArgument, config: Config) -> None:
    """Continue many prompts as one continuous batch: lines {"prompt": ...} or {"ids": [...]}, with
    sampling fields and {"structured_outputs": {"json": SCHEMA}} (or regex, choice, grammar,
    json_object), in; the same with ids, output_ids, text, finish_reason and, of one that failed,
    error out."""
    with session(config, model) as loaded:
        defaults = {"max_tokens": 128} | command_line_defaults(loaded.checkpoint)
        requests: list[Request] = []
        lines: list[Line] = []
        for number, line in read_lines(file):
            place = f"{file}, line {number}"
            params = _sampling(line, config, defaults, place)
            ids = tuple(prompt_ids(line, loaded.tokenizer, place))
            requests.append(
                Request(
                    id=str(len(lines)), prompt=ids, params=params, grammar=_grammar(line, place)
                )
            )
            submit(loaded, requests[-1], place)
            lines.append(line)
        collected: dict[tuple[str, int], list[RequestOutput]] = {}
        done: dict[int, list[Line]] = {}
        written = 0
        failure = None
        for output in loaded.client.drain():
            index = int(output.request_id)
            parts = collected.setdefault((output.request_id, output.choice), [])
            parts.append(output)
            if output.finish_reason is None:
                continue
            failure = failure or output.error
            del collected[output.request_id, output.choice]
            done.setdefault(index, []).append(_result(lines[index], requests[index], parts))
            while (
                written < len(requests) and len(done.get(written, ())) == requests[written].params.n
            ):
                for result in sorted(done.pop(written), key=lambda line: line.get("choice", 0)):
                    write_line(result)
                written += 1
        _check(failure)


def _result(line: Line, request: Request, parts: list[RequestOutput]) -> Line:
    result = {
        **line,
        "ids": list(request.prompt),
        "output_ids": [token for part in parts for token in part.ids],
        "text": "".join(part.text for part in parts),
        "finish_reason": parts[-1].finish_reason,
        **_error(parts[-1]),
    }
    if request.params.n > 1:
        result["choice"] = parts[-1].choice
    if request.params.logprobs is not None:
        result["output_logprobs"] = [
            {"id": entry.id, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
            for part in parts
            for entry in part.logprobs
        ]
    if request.params.prompt_logprobs is not None:
        result["prompt_logprobs"] = [
            {"id": entry.id, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
            for entry in parts[0].prompt_logprobs
        ]
    return result


def _sampling(
    line: Line, config: Config, defaults: Mapping[str, Any], place: str
) -> SamplingParams:
    """A line's sampling fields over those of the command line over `defaults`."""
    fields = {name: line[name] for name in SAMPLING_FIELDS & line.keys()}
    for name in line.keys() - SAMPLING_FIELDS - _OWN_NAMES:
        close = difflib.get_close_matches(name, SAMPLING_FIELDS, n=1, cutoff=0.85)
        if close:
            raise RequestError(
                f"{place}: {name!r} is no sampling field: did you mean {close[0]!r}?"
            )
    try:
        checked = Config.model_validate(fields)
        said = {name: getattr(checked, name) for name in fields}
        return config.model_copy(update=said).sampling(**defaults)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RequestError(f"{place}: {first['loc'][0]}: {first['msg']}") from None
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from None


_OWN_NAMES = {
    "prompt", "ids", "output_ids", "text", "top", "finish_reason", "choice", "structured_outputs",
}  # fmt: skip
"""Names that these commands read or write themselves."""

_IDS = TypeAdapter(list[int])


def _grammar(line: Line, place: str) -> Grammar | None:
    """What the output must be, as vLLM's `structured_outputs` says it. Raises ConfigError."""
    said = line.get("structured_outputs")
    if said is None:
        return None
    if isinstance(said, dict) and len(said) == 1:
        [(name, value)] = said.items()
        if name == "json":
            text = value if isinstance(value, str) else json.dumps(value)
            return Grammar(kind="json_schema", text=text)
        if name == "json_object" and value is True:
            return Grammar(kind="json_object")
        if name == "choice":
            return Grammar(kind="choice", text=json.dumps(value))
        if name in ("regex", "grammar") and isinstance(value, str):
            return Grammar(kind="regex" if name == "regex" else "lark", text=value)
    raise ConfigError(
        f'{place}: "structured_outputs" needs one of json (a schema), regex, grammar (texts), '
        "choice (a list of texts) and json_object (true)"
    )


def prompt_ids(line: Line, tokenizer: Tokenizer, place: str) -> list[int]:
    """The prompt of a line as token ids. Raises ConfigError when it has none."""
    prompt, ids = line.get("prompt"), line.get("ids")
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
    try:
        checked = _IDS.validate_python(ids, strict=True)
    except ValidationError:
        checked = []
    if not checked:
        raise ConfigError(f'{place}: needs "prompt", a text, or "ids", a list of token ids')
    return checked


def read_lines(file: Path) -> Iterator[tuple[int, Line]]:
    """(line number, object) of every non-blank line. Raises ConfigError for what is no object."""
    try:
        with sys.stdin.buffer if str(file) == "-" else file.open("rb") as source:
            for number, text in enumerate(iter(lambda: source.readline(MAX_LINE), b""), 1):
                if not text.strip():
                    continue
                if len(text) == MAX_LINE and not text.endswith(b"\n"):
                    limit = f"{MAX_LINE >> 20} MiB"
                    raise ConfigError(f"{file}, line {number} is longer than {limit}: split it")
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{file}, line {number} is not JSON: {error}") from None
                if not isinstance(line, dict):
                    raise ConfigError(f"{file}, line {number}: write one JSON object a line")
                yield number, line
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def submit(loaded: Loaded, request: Request, place: str) -> None:
    try:
        loaded.client.submit(request)
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from None


def write_line(line: Line) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _in_order(outputs: Iterator[RequestOutput], count: int) -> Iterator[RequestOutput]:
    """Outputs of one-output requests in the order of their numbers."""
    early: dict[int, RequestOutput] = {}
    following = 0
    for output in outputs:
        early[int(output.request_id)] = output
        while following in early:
            yield early.pop(following)
            following += 1
    assert following == count


def _error(output: RequestOutput) -> Line:
    return {} if output.error is None else {"error": output.error}


def _check(failure: str | None) -> None:
    """Fail after the lines are written: one that failed takes nothing from the others."""
    if failure is not None:
        raise RequestError(failure)
