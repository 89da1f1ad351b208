"""Perplexity of a text, and how far from a reference a model's distributions over it lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polysilicon.engine.loading import Loaded
from polysilicon.errors import ConfigError
from polysilicon.evals.distributions import Distributions
from polysilicon.evals.divergence import Comparison, aligned, compare, joined
from polysilicon.evals.requests import answers
from polysilicon.evals.statistics import Float64, estimate, spread
from polysilicon.evals.windows import Cut, Window, beginning_of_text
from polysilicon.progress import Tick
from polysilicon.request import Request, SamplingParams

MAX_TEXT = 16 << 20
_SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextScores:
    """The scored tokens of a text in order, `[n]`. tokens: their ids. places: their indices in
    their windows. logprobs: of the model. vocabulary: how many ids they are shares of. comparison:
    with the reference, where there is one."""

    windows: int
    tokens: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    logprobs: Float64
    vocabulary: int
    comparison: Comparison | None = None


def read_text(path: Path) -> str:
    """A text file. Raises ConfigError for one that is missing, too large, empty, or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_TEXT:
        raise ConfigError(f"{path} is larger than {MAX_TEXT >> 20} MiB: take a part of it")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 at byte {error.start}: convert it, as with iconv -t utf-8"
        ) from None
    if not text.strip():
        raise ConfigError(f"{path} holds no text")
    return text


def windows_of(loaded: Loaded, text: str, cut: Cut) -> list[Window]:
    """The windows of a text for a model. Raises ConfigError where the model's context is shorter
    than a window, and where nothing can be scored."""
    tokens = loaded.tokenizer.encode(text, add_special=False, parse_special=False)
    windows = list(cut.windows(tokens, beginning_of_text(loaded.tokenizer)))
    longest = max(len(window.tokens) for window in windows)
    if longest > loaded.engine.max_length:
        raise ConfigError(
            f"windows of {longest} tokens do not fit into the context of "
            f"{loaded.engine.max_length}: lower --context, or raise --max-length or --kv-memory"
        )
    return windows


def score_text(loaded: Loaded, windows: Sequence[Window], tick: Tick) -> TextScores:
    """Score a text's windows, many at a time. Raises RequestError when the engine fails."""
    found: dict[int, Float64] = {}
    requests = (
        (Request(id=str(index), prompt=window.tokens, params=_SCORING), "a window")
        for index, window in enumerate(windows)
    )
    for request, outputs in answers(loaded, requests):
        scores = [entry.logprob for output in outputs for entry in output.prompt_logprobs]
        index = int(request.id)
        # Those of the prompt begin with its second token.
        found[index] = np.array(scores[windows[index].first - 1 :], np.float64)
        tick()
    logprobs = np.concatenate([found[index] for index in range(len(windows))])
    return _scores(windows, logprobs, loaded.engine.executor.vocab_size)


def compare_text(
    loaded: Loaded, reference: Loaded, windows: Sequence[Window], tick: Tick
) -> TextScores:
    """Score a text's windows by a model and a reference side by side, over the ids that both have.

    Raises RequestError when an engine fails.
    """
    pair = Distributions(loaded), Distributions(reference)
    width = min(model.vocab_size for model in pair)
    comparison = joined(list(_compared(*pair, width, windows, tick)))
    return _scores(windows, comparison.logprob, width, comparison)


def _compared(
    model: Distributions,
    reference: Distributions,
    width: int,
    windows: Iterable[Window],
    tick: Tick,
) -> Iterator[Comparison]:
    for window in windows:
        targets = np.array(window.scored, np.int64)
        at = 0
        for ours, theirs in aligned(model.of(window), reference.of(window)):
            end = at + len(ours)
            yield compare(ours[:, :width], theirs[:, :width], targets[at:end])
            at = end
        tick()


def _scores(
    windows: Sequence[Window],
    logprobs: Float64,
    vocabulary: int,
    comparison: Comparison | None = None,
) -> TextScores:
    places = [np.arange(window.first, len(window.tokens)) for window in windows]
    return TextScores(
        windows=len(windows),
        tokens=np.concatenate([np.array(window.scored, np.int64) for window in windows]),
        places=np.concatenate(places),
        logprobs=logprobs,
        vocabulary=vocabulary,
        comparison=comparison,
    )


def text_figures(scores: TextScores) -> dict[str, float | None]:
    """Figures by name; a `_stderr` beside those that are means.

    Definitions that llama.cpp's `--kl-divergence` has are the same: `mean_kl` and its percentiles
    in nats, `agreement` (its "same top p"), `probability_change` of the text's tokens (its delta
    p). `delta` is the absolute difference of their log-probabilities; `perplexity_ratio` has the
    reference's perplexity below the line.
    """
    cost = estimate(-scores.logprobs)
    figures: dict[str, float | None] = {
        "windows": scores.windows,
        "scored_tokens": len(scores.logprobs),
        "vocabulary": scores.vocabulary,
        "impossible_tokens": int(np.isneginf(scores.logprobs).sum()),
        **cost.figures("mean_cost"),
        **cost.exponential().figures("perplexity"),
    }
    if scores.comparison is None:
        return figures
    found = scores.comparison
    with np.errstate(invalid="ignore", under="ignore"):
        # Tokens that both hold for impossible do not differ.
        both = np.isneginf(found.logprob) & np.isneginf(found.reference)
        difference = np.where(both, 0.0, found.logprob - found.reference)
        change = np.exp(found.logprob) - np.exp(found.reference)
    return figures | {
        **estimate(-found.reference).exponential().figures("reference_perplexity"),
        **estimate(-difference).exponential().figures("perplexity_ratio"),
        **spread("kl", found.divergence),
        **estimate(found.same_top).figures("agreement"),
        **spread("delta", np.abs(difference)),
        **estimate(change).figures("mean_probability_change"),
        "rms_probability_change": float(np.sqrt(np.square(change).mean())),
    }
