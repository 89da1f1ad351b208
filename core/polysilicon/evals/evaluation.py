"""What an eval found, in the form that tables, JSON and the report show."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from polysilicon.evals.answers import Outcome
from polysilicon.evals.tasks import Task
from polysilicon.evals.text import TextScores
from polysilicon.evals.windows import Window
from polysilicon.tokenizer import Tokenizer

NOTABLE = 10
_BEFORE = 12


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model as it was run. settings: the engine's that were given."""

    model: str
    backend: str
    settings: Mapping[str, object]

    def __str__(self) -> str:
        """For people: the last part of a path, and the settings."""
        pairs = (f"{name}={_text(value)}" for name, value in self.settings.items())
        return " ".join([self.model.rstrip("/").rpartition("/")[2], *pairs])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NotableToken:
    """A token at which the models differ the most, or without a reference the least expected.
    before: the text that stands before it."""

    before: str
    token: str
    logprob: float
    reference: float | None
    divergence: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """source: the file. how: what was done with it, in words. failures: why thresholds do not hold.
    scores, notable: of a text. tasks, outcomes: of tasks."""

    subject: Subject
    reference: Subject | None
    source: str
    how: str
    figures: Mapping[str, float | None]
    failures: Sequence[str] = ()
    scores: TextScores | None = None
    notable: Sequence[NotableToken] = ()
    tasks: Sequence[Task] = ()
    outcomes: Sequence[Outcome] = ()

    def json(self) -> dict[str, object]:
        """Its figures beside what they are of. JSON has no infinity: null stands for it."""
        figures = {
            name: None if value is None or not math.isfinite(value) else value
            for name, value in self.figures.items()
        }
        return {
            "model": dataclasses.asdict(self.subject),
            "reference": None if self.reference is None else dataclasses.asdict(self.reference),
            "source": self.source,
            "how": self.how,
            **figures,
            "failures": list(self.failures),
        }


def notable_tokens(
    scores: TextScores, windows: Sequence[Window], tokenizer: Tokenizer
) -> list[NotableToken]:
    """The tokens of the greatest divergence, or of the least probability, the worst first."""
    found = scores.comparison
    rank = -scores.logprobs if found is None else found.divergence
    ends = np.cumsum([len(window.scored) for window in windows])
    notable = []
    for index in np.argsort(-rank, kind="stable")[:NOTABLE].tolist():
        window = windows[int(np.searchsorted(ends, index, side="right"))]
        place = int(scores.places[index])
        before = window.tokens[max(0, place - _BEFORE) : place]
        notable.append(
            NotableToken(
                before=tokenizer.decode(before, skip_special=False),
                token=tokenizer.token_text(int(scores.tokens[index])),
                logprob=float(scores.logprobs[index]),
                reference=None if found is None else float(found.reference[index]),
                divergence=None if found is None else float(found.divergence[index]),
            )
        )
    return notable


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return str(value)
