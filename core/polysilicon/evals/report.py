"""The HTML report of an eval: one file, which loads nothing from elsewhere."""

from __future__ import annotations

from polysilicon import html_page
from polysilicon.evals import plots
from polysilicon.evals.answers import Outcome
from polysilicon.evals.evaluation import Evaluation
from polysilicon.evals.tables import columns, rows
from polysilicon.evals.tasks import MultipleChoice, Task

_MOST_WRONG = 100


def render(evaluation: Evaluation) -> str:
    """The report: figures, plots, and what went wrong the most."""
    compared = evaluation.reference is not None
    if evaluation.scores is None:
        svg = plots.of_tasks(evaluation.figures, compared=compared)
    else:
        svg = plots.of_text(evaluation.scores)
    wrong = [
        _wrong(task, outcome)
        for task, outcome in zip(evaluation.tasks, evaluation.outcomes, strict=True)
        if not outcome.correct
    ]
    return html_page.render(
        "polysilicon.evals",
        subject=str(evaluation.subject),
        reference=None if evaluation.reference is None else str(evaluation.reference),
        source=evaluation.source,
        how=evaluation.how,
        columns=columns(evaluation),
        rows=rows(evaluation),
        failures=evaluation.failures,
        plots=html_page.address(svg),
        notable=evaluation.notable,
        wrong=wrong[:_MOST_WRONG],
        more_wrong=max(0, len(wrong) - _MOST_WRONG),
    )


def _wrong(task: Task, outcome: Outcome) -> dict[str, str]:
    if isinstance(task, MultipleChoice):
        right = task.choices[task.answer]
        return {"place": task.place, "prompt": task.context, "right": right, "said": outcome.answer}
    right = " | ".join(task.answers)
    return {"place": task.place, "prompt": task.prompt, "right": right, "said": outcome.answer}
