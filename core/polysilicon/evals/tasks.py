"""Tasks with known answers, one JSON object each: multiple choice and exact match.

Multiple choice: {"context": text, "choices": [texts], "answer": index or text of the right one}. A
choice stands right behind the context, its leading space included.

Exact match: {"prompt": text, "answer": text} or "answers", a list of texts of which any is right;
"max_tokens" (64), "stop" (a text or several; a line's end), "normalisation" of both sides before
they are compared: "none", "strip" (white space around them; the default) or "squad" (as in SQuAD's
evaluation: lower case, no punctuation, no articles, single spaces).

`context` and `prompt` are one name. Other names, such as an id, are not heeded.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import string
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from polysilicon.errors import ConfigError

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    """place: the file and line. answer: index of the right choice."""

    place: str
    context: str
    choices: tuple[str, ...]
    answer: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """place: the file and line. answers: normalised."""

    place: str
    prompt: str
    answers: tuple[str, ...]
    max_tokens: int
    stop: tuple[str, ...]
    normalise: Callable[[str], str]


Task = MultipleChoice | ExactMatch

_COMMON = ("context", "prompt", "answer")
_CHOICE_NAMES = (*_COMMON, "choices")
_MATCH_NAMES = (*_COMMON, "answers", "max_tokens", "stop", "normalisation")
_TEXT = TypeAdapter(str)
_TEXTS = TypeAdapter(list[str])
_NUMBER = TypeAdapter(int)


def parse_task(line: Mapping[str, Any], place: str) -> Task:
    """A task from its line. Raises ConfigError, which names the place and the mend."""
    names = _CHOICE_NAMES if "choices" in line else _MATCH_NAMES
    for name in line:
        known = (*_CHOICE_NAMES, *_MATCH_NAMES)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name not in known and close:
            raise ConfigError(f"{place}: {name!r} is no name here: did you mean {close[0]!r}?")
        if name in known and name not in names:
            kind = "multiple choice" if "choices" in line else "exact match"
            raise ConfigError(f"{place}: {name!r} does not go with {kind}: leave it out")
    prompts = [line[name] for name in ("context", "prompt") if name in line]
    if len(prompts) != 1 or not isinstance(prompts[0], str) or not prompts[0]:
        raise ConfigError(f'{place}: needs "context" or "prompt", a text that is not empty')
    if "choices" in line:
        choices = _field(line, "choices", _TEXTS, "a list of texts", place)
        return _multiple_choice(line, prompts[0], choices, place)
    return _exact_match(line, prompts[0], place)


def _multiple_choice(
    line: Mapping[str, Any], context: str, choices: list[str], place: str
) -> MultipleChoice:
    if len(choices) < 2 or "" in choices:
        raise ConfigError(f'{place}: "choices" needs two texts or more, none of them empty')
    answer = line.get("answer")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ConfigError(
            f'{place}: "answer" needs the text of a choice, or its index between 0 and '
            f"{len(choices) - 1}"
        )
    return MultipleChoice(place=place, context=context, choices=tuple(choices), answer=answer)


def _exact_match(line: Mapping[str, Any], prompt: str, place: str) -> ExactMatch:
    if ("answer" in line) == ("answers" in line):
        raise ConfigError(
            f'{place}: needs one of "choices", "answer", a text, and "answers", a list of texts'
        )
    if "answer" in line:
        answers = [_field(line, "answer", _TEXT, "a text", place)]
    else:
        answers = _field(line, "answers", _TEXTS, "a list of texts", place)
    if not answers:
        raise ConfigError(f'{place}: "answers" is empty: give at least one text')
    max_tokens = 64
    if "max_tokens" in line:
        max_tokens = _field(line, "max_tokens", _NUMBER, "a number", place)
    if not 0 < max_tokens < 1 << 31:
        raise ConfigError(f'{place}: "max_tokens" must be above 0, not {max_tokens!s:.20}')
    stop = ["\n"]
    if isinstance(line.get("stop"), str):
        stop = [line["stop"]]
    elif "stop" in line:
        stop = _field(line, "stop", _TEXTS, "a text or a list of texts", place)
    if "" in stop:
        raise ConfigError(f'{place}: "stop" holds an empty text: leave it out')
    name = line.get("normalisation", "strip")
    if not isinstance(name, str) or name not in NORMALISATIONS:
        raise ConfigError(f'{place}: "normalisation" is one of {", ".join(NORMALISATIONS)}')
    normalise = NORMALISATIONS[name]
    return ExactMatch(
        place=place,
        prompt=prompt,
        answers=tuple(map(normalise, answers)),
        max_tokens=max_tokens,
        stop=tuple(stop),
        normalise=normalise,
    )


def _field(line: Mapping[str, Any], name: str, kind: TypeAdapter[_T], form: str, place: str) -> _T:
    try:
        return kind.validate_python(line[name], strict=True)
    except ValidationError:
        raise ConfigError(f'{place}: "{name}" needs {form}') from None


def _squad(text: str) -> str:
    """As the script of SQuAD (arXiv 1606.05250) does it."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", plain).split())


NORMALISATIONS: Mapping[str, Callable[[str], str]] = {
    "none": str,
    "strip": str.strip,
    "squad": _squad,
}
