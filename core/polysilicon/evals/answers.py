"""What a model answers to tasks, and how often it is right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from polysilicon.engine.loading import Loaded
from polysilicon.errors import RequestError
from polysilicon.evals.requests import answers
from polysilicon.evals.statistics import estimate
from polysilicon.evals.tasks import ExactMatch, MultipleChoice, Task
from polysilicon.evals.windows import beginning_of_text
from polysilicon.progress import Tick
from polysilicon.request import Request, RequestOutput, SamplingParams

_SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one task. answer: the choice of the greatest log-probability, or the text that
    was generated, normalised. correct_by_length: of a multiple choice, with each choice's
    log-probability divided by its characters. scores: the choices' log-probabilities. Of equal
    choices the first is taken; where none has any probability, as of logits that are all NaN, the
    answer is wrong."""

    answer: str
    correct: bool
    correct_by_length: bool | None = None
    scores: tuple[float, ...] = ()


def run_tasks(loaded: Loaded, tasks: Sequence[Task], tick: Tick) -> list[Outcome]:
    """Answer tasks, many at a time. Text is generated greedily.

    Raises RequestError, which names the place, for a task that does not fit the model's context,
    and when the engine fails.
    """
    scores: dict[int, dict[int, float]] = {}
    outcomes: dict[int, Outcome] = {}
    boundaries: dict[str, int] = {}
    for request, outputs in answers(loaded, _requests(loaded, tasks, boundaries)):
        index, choice = map(int, request.id.split("/"))
        task = tasks[index]
        if isinstance(task, ExactMatch):
            outcomes[index] = _matched(task, outputs)
        else:
            of_task = scores.setdefault(index, {})
            of_task[choice] = _sum(outputs, boundaries.pop(request.id))
            if len(of_task) < len(task.choices):
                continue
            del scores[index]
            outcomes[index] = _chosen(task, [of_task[i] for i in range(len(task.choices))])
        tick()
    return [outcomes[index] for index in range(len(tasks))]


def _requests(
    loaded: Loaded, tasks: Sequence[Task], boundaries: dict[str, int]
) -> Iterator[tuple[Request, str]]:
    """The requests of tasks, a choice each. boundaries: gets the index of the first token that is
    of the choice, by request."""
    beginning = beginning_of_text(loaded.tokenizer)

    def encode(text: str) -> tuple[int, ...]:
        ids = loaded.tokenizer.encode(text, add_special=False, parse_special=True)
        return (*beginning, *ids)

    for index, task in enumerate(tasks):
        if isinstance(task, ExactMatch):
            params = SamplingParams(max_tokens=task.max_tokens, stop=task.stop, temperature=0)
            prompt = encode(task.prompt)
            yield Request(id=f"{index}/0", prompt=prompt, params=params), task.place
            continue
        context = encode(task.context)
        for choice, text in enumerate(task.choices):
            whole = encode(task.context + text)
            boundary = _common(context, whole)
            if not 0 < boundary < len(whole):
                raise RequestError(
                    f"{task.place}: no token of choice {choice} stands behind one of the context: "
                    "change the one or the other"
                )
            request = Request(id=f"{index}/{choice}", prompt=whole, params=_SCORING)
            boundaries[request.id] = boundary
            yield request, task.place


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def _sum(outputs: Sequence[RequestOutput], boundary: int) -> float:
    scores = [entry.logprob for output in outputs for entry in output.prompt_logprobs]
    # Those of the prompt begin with its second token.
    return float(np.sum(scores[boundary - 1 :]))


def _chosen(task: MultipleChoice, scores: list[float]) -> Outcome:
    chosen = int(np.argmax(scores))
    by_length = [score / len(text) for score, text in zip(scores, task.choices, strict=True)]
    possible = scores[chosen] > -math.inf
    return Outcome(
        answer=task.choices[chosen],
        correct=possible and chosen == task.answer,
        correct_by_length=possible and int(np.argmax(by_length)) == task.answer,
        scores=tuple(scores),
    )


def _matched(task: ExactMatch, outputs: Sequence[RequestOutput]) -> Outcome:
    answer = task.normalise("".join(output.text for output in outputs))
    return Outcome(answer=answer, correct=answer in task.answers)


def task_figures(
    outcomes: Sequence[Outcome], reference: Sequence[Outcome] | None = None
) -> dict[str, float | None]:
    """Figures by name, a `_stderr` beside those that are means.

    accuracy: of all tasks; choice_accuracy, choice_accuracy_by_length and match_accuracy: of those
    of a kind. accuracy_difference: from the reference's, its error over paired tasks; agreement:
    how often both give the same answer, right or wrong.
    """
    figures: dict[str, float | None] = {"tasks": len(outcomes), **_accuracies(outcomes)}
    if reference is None:
        return figures
    right = np.array([outcome.correct for outcome in outcomes], np.float64)
    theirs = np.array([outcome.correct for outcome in reference], np.float64)
    same = [a.answer == b.answer for a, b in zip(outcomes, reference, strict=True)]
    return figures | {
        **{f"reference_{name}": value for name, value in _accuracies(reference).items()},
        **estimate(right - theirs).figures("accuracy_difference"),
        **estimate(np.array(same)).figures("agreement"),
    }


def _accuracies(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    choices = [outcome for outcome in outcomes if outcome.correct_by_length is not None]
    matches = [outcome for outcome in outcomes if outcome.correct_by_length is None]
    lists = {
        "accuracy": [outcome.correct for outcome in outcomes],
        "choice_accuracy": [outcome.correct for outcome in choices],
        "choice_accuracy_by_length": [bool(outcome.correct_by_length) for outcome in choices],
        "match_accuracy": [outcome.correct for outcome in matches],
    }
    return {
        name: value
        for kind, correct in lists.items()
        if correct
        for name, value in estimate(np.array(correct)).figures(kind).items()
    }
