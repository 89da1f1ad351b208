"""Plots of evals, as SVG. Needs matplotlib, which the extra `bench` brings."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from polysilicon.bench.plots import draw
from polysilicon.evals.statistics import Float64
from polysilicon.evals.text import TextScores

_POINTS = 800
_BINS = 60
_FLOOR = 1e-9
"""Smaller differences are shown as this one: a logarithmic axis has no zero."""

Plot = tuple[str, Callable[[Axes], None]]


def of_text(scores: TextScores) -> bytes:
    """How the scores of a text run and are distributed."""
    found = scores.comparison
    if found is None:
        curves = {"model": scores.logprobs}
        plots = [running_perplexity(curves), by_place(curves, scores.places)]
        return draw(3, [*plots, ("Cost of a token (nats)", _histogram(-scores.logprobs))])
    curves = {"model": scores.logprobs, "reference": found.reference}
    with np.errstate(invalid="ignore"):
        delta = np.abs(found.logprob - found.reference)
    return draw(
        3,
        [
            running_perplexity(curves),
            by_place(curves, scores.places),
            ("Log-probabilities of the text", _scatter(found.reference, found.logprob)),
            ("KL divergence (nats)", _log_histogram(found.divergence)),
            ("|delta log-prob|", _log_histogram(delta)),
            ("KL divergence by place", _means(found.divergence, scores.places)),
        ],
    )


def of_tasks(figures: Mapping[str, float | None], *, compared: bool) -> bytes:
    """Accuracies with their standard errors."""
    names = [
        name
        for name in ("accuracy", "choice_accuracy", "choice_accuracy_by_length", "match_accuracy")
        if name in figures
    ]

    def bars(axes: Axes) -> None:
        prefixes = ("", "reference_") if compared else ("",)
        for shift, prefix in enumerate(prefixes):
            axes.barh(
                [place + 0.35 * shift for place in range(len(names))],
                [figures[prefix + name] or 0.0 for name in names],
                xerr=[figures[f"{prefix}{name}_stderr"] or 0.0 for name in names],
                height=0.3,
                label="reference" if prefix else "model",
            )
        axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))

    return draw(1, [("Accuracy", bars)])


def running_perplexity(curves: Mapping[str, Float64]) -> Plot:
    def plot(axes: Axes) -> None:
        for label, logprobs in curves.items():
            counts = np.arange(1, len(logprobs) + 1)
            with np.errstate(over="ignore"):
                perplexity = np.exp(-np.cumsum(logprobs) / counts)
            shown = np.unique(np.linspace(0, len(logprobs) - 1, _POINTS).astype(int))
            axes.plot(counts[shown], _finite(perplexity[shown]), label=label)
        axes.set_xlabel("tokens")
        axes.set_yscale("log")
        axes.legend(frameon=False)

    return "Perplexity up to here", plot


def by_place(curves: Mapping[str, Float64], places: npt.NDArray[np.int64]) -> Plot:
    def plot(axes: Axes) -> None:
        for label, logprobs in curves.items():
            axes.plot(*_binned(-logprobs, places), label=label)
        axes.set_xlabel("place in the window")
        axes.set_ylabel("nats a token")
        axes.legend(frameon=False)

    return "Cost by place", plot


def _means(values: Float64, places: npt.NDArray[np.int64]) -> Callable[[Axes], None]:
    def plot(axes: Axes) -> None:
        axes.plot(*_binned(values, places))
        axes.set_xlabel("place in the window")
        axes.set_ylim(bottom=0)

    return plot


def _binned(values: Float64, places: npt.NDArray[np.int64]) -> tuple[Float64, Float64]:
    """Mean place and mean value of up to 32 ranges of places."""
    edges = np.unique(np.linspace(places.min(), places.max() + 1, 33).astype(np.int64))
    bins = np.searchsorted(edges, places, side="right")
    used, index, counts = np.unique(bins, return_inverse=True, return_counts=True)
    sums = [np.bincount(index, weights, minlength=len(used)) for weights in (places, values)]
    return sums[0] / counts, _finite(sums[1] / counts)


def _scatter(x: Float64, y: Float64) -> Callable[[Axes], None]:
    def plot(axes: Axes) -> None:
        # As pixels: an SVG of ten thousand circles would be slow to show.
        axes.plot(_finite(x), _finite(y), ".", markersize=3, alpha=0.5, rasterized=True)
        axes.axline((0, 0), slope=1, color="black", linewidth=0.6)
        axes.set_xlabel("reference")
        axes.set_ylabel("model")

    return plot


def _histogram(values: Float64) -> Callable[[Axes], None]:
    def plot(axes: Axes) -> None:
        axes.hist(values[np.isfinite(values)], bins=_BINS)
        axes.set_ylabel("tokens")

    return plot


def _log_histogram(values: Float64) -> Callable[[Axes], None]:
    def plot(axes: Axes) -> None:
        shown = np.maximum(values[np.isfinite(values)], _FLOOR)
        high = max(shown.max(initial=_FLOOR), 10 * _FLOOR)
        axes.hist(shown, bins=np.geomspace(shown.min(initial=high), high * 1.001, _BINS).tolist())
        axes.set_xscale("log")
        axes.set_ylabel("tokens")

    return plot


def _finite(values: Float64) -> Float64:
    return np.where(np.isfinite(values), values, np.nan)
