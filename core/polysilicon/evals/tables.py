"""The figures of an eval as rows for people to read."""

from __future__ import annotations

from collections.abc import Mapping

from polysilicon.evals.evaluation import Evaluation

_FIGURES = (
    ("Tokens scored", "scored_tokens", ",.0f"),
    ("  in windows", "windows", ",.0f"),
    ("  of a vocabulary of", "vocabulary", ",.0f"),
    ("  of no probability", "impossible_tokens", ",.0f"),
    ("Perplexity", "perplexity", ",.4f"),
    ("Perplexity over the reference's", "perplexity_ratio", ".5f"),
    ("KL divergence, mean (nats)", "mean_kl", ".6f"),
    ("  median", "kl_p50", ".6f"),
    ("  90 %", "kl_p90", ".6f"),
    ("  95 %", "kl_p95", ".6f"),
    ("  99 %", "kl_p99", ".6f"),
    ("  99.9 %", "kl_p99.9", ".6f"),
    ("  largest", "kl_max", ".6f"),
    ("|delta log-prob|, mean", "mean_delta", ".6f"),
    ("  median", "delta_p50", ".6f"),
    ("  90 %", "delta_p90", ".6f"),
    ("  95 %", "delta_p95", ".6f"),
    ("  99 %", "delta_p99", ".6f"),
    ("  99.9 %", "delta_p99.9", ".6f"),
    ("  largest", "delta_max", ".6f"),
    ("Change of probability, mean", "mean_probability_change", ".4%"),
    ("  root mean square", "rms_probability_change", ".4%"),
    ("Tasks", "tasks", ",.0f"),
    ("Accuracy", "accuracy", ".2%"),
    ("  of choices, by log-probability", "choice_accuracy", ".2%"),
    ("  of choices, by that over length", "choice_accuracy_by_length", ".2%"),
    ("  of exact matches", "match_accuracy", ".2%"),
    ("Accuracy over the reference's", "accuracy_difference", "+.2%"),
    ("Agreement with the reference", "agreement", ".3%"),
)

_ONLY_WHERE_ABOVE_ZERO = ("impossible_tokens",)


def columns(evaluation: Evaluation) -> tuple[str, ...]:
    if evaluation.reference is None:
        return ("figure", str(evaluation.subject))
    return ("figure", str(evaluation.subject), f"reference: {evaluation.reference}")


def rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """One row a figure: its value and standard error, and the reference's where it has its own."""
    figures = evaluation.figures
    table = []
    for label, name, form in _FIGURES:
        if name not in figures or (name in _ONLY_WHERE_ABOVE_ZERO and not figures[name]):
            continue
        cells = [cell(figures, name, form)]
        if evaluation.reference is not None:
            own = f"reference_{name}"
            cells.append(cell(figures, own, form) if own in figures else "")
        table.append((label, *cells))
    return table


def cell(figures: Mapping[str, float | None], name: str, form: str) -> str:
    """A figure with its standard error."""
    value, error = figures[name], figures.get(f"{name}_stderr")
    assert value is not None
    if error is None:
        return format(value, form)
    return f"{format(value, form)} ± {format(error, form.removeprefix('+'))}"
