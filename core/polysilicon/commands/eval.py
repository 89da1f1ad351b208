"""`polysilicon eval`: how well a model does on a text or on tasks, and how far from a reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from polysilicon import progress
from polysilicon.commands.lines import ModelArgument, read_lines
from polysilicon.commands.options import configured
from polysilicon.commands.output import print_json, print_table, write_file
from polysilicon.commands.session import ENGINE_FIELDS, session
from polysilicon.config import Config, load_config
from polysilicon.engine.loading import Loaded
from polysilicon.errors import ConfigError
from polysilicon.evals.answers import run_tasks, task_figures
from polysilicon.evals.evaluation import Evaluation, Subject, notable_tokens
from polysilicon.evals.tables import columns, rows
from polysilicon.evals.tasks import Task, parse_task
from polysilicon.evals.text import (
    compare_text,
    read_text,
    score_text,
    text_figures,
    windows_of,
)
from polysilicon.evals.thresholds import QualityError, Threshold, failures, threshold
from polysilicon.evals.windows import Cut, beginning_of_text
from polysilicon.suggest import nearest

_INPUT, _REFERENCE, _THRESHOLDS, _OUTPUT = "Input", "Reference", "Thresholds", "Output"


@configured(ENGINE_FIELDS)
def evaluate(
    model: ModelArgument,
    config: Config,
    text: Annotated[
        Path | None, typer.Option(help="File with the text to score.", rich_help_panel=_INPUT)
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines, - for standard input: {"context", "choices", "answer"}, or '
            '{"prompt", "answer"} or "answers", with "max_tokens", "stop", "normalisation" (none, '
            "strip, squad).",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    convention: Annotated[
        Literal["huggingface", "llamacpp"] | None,
        typer.Option(
            help="How windows are cut. huggingface, the default: each is --stride further, every "
            "token is scored once. llamacpp: side by side, their second halves are scored.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window. Default: 512.", rich_help_panel=_INPUT)
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from one window to the next. Default: half a window.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REFERENCE",
            help="Model to compare with; MODEL itself where --against-with tells them apart.",
            rich_help_panel=_REFERENCE,
        ),
    ] = None,
    against_with: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An engine option of the reference's own, such as backend=reference or "
            "kv-dtype=f32; may be repeated. The others are as given, but for --quantization, "
            "--quantize and, on another backend, those of the model's backend.",
            rich_help_panel=_REFERENCE,
        ),
    ] = None,
    max_perplexity: Annotated[
        float | None, typer.Option(help="Of the text.", rich_help_panel=_THRESHOLDS)
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Mean KL divergence from the reference, in nats.", rich_help_panel=_THRESHOLDS
        ),
    ] = None,
    max_delta: Annotated[
        float | None,
        typer.Option(
            help="Mean |delta log-prob| of the text's tokens.", rich_help_panel=_THRESHOLDS
        ),
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(
            help="Share of tokens whose likeliest is the reference's, or of tasks with the same "
            "answer.",
            rich_help_panel=_THRESHOLDS,
        ),
    ] = None,
    min_accuracy: Annotated[
        float | None,
        typer.Option(
            help="Share of tasks answered right; choices by their log-probability.",
            rich_help_panel=_THRESHOLDS,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", rich_help_panel=_OUTPUT)
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="HTML file to write tables and plots to.", rich_help_panel=_OUTPUT),
    ] = None,
) -> None:
    """Perplexity of a text, or accuracy on tasks; against a reference also KL divergence over the
    whole vocabulary, agreement and differences of log-probabilities, with the definitions of
    llama.cpp's --kl-divergence.

    Exits with status 1 and the reason where a threshold does not hold.
    """
    if (text is None) == (tasks is None):
        raise ConfigError("eval takes one of --text FILE and --tasks FILE.jsonl")
    thresholds = _thresholds(
        {
            "--max-perplexity": max_perplexity,
            "--max-kl": max_kl,
            "--max-delta": max_delta,
            "--min-agreement": min_agreement,
            "--min-accuracy": min_accuracy,
        },
        of_text=text is not None,
        compared=against is not None,
    )
    if against is None and against_with:
        raise ConfigError("--against-with needs --against REFERENCE, which may be MODEL itself")
    other = None if against is None else (against, _reference_config(config, against_with or []))
    _check_report(report)
    if text is not None:
        cut = Cut(
            convention=convention or "huggingface",
            context=512 if context is None else context,
            stride=stride,
        )
        evaluation = _on_text(model, config, other, text, cut, thresholds)
    else:
        assert tasks is not None
        if (convention, context, stride) != (None, None, None):
            raise ConfigError("--convention, --context and --stride go with --text: leave them out")
        evaluation = _on_tasks(model, config, other, tasks, thresholds)
    if as_json:
        print_json(evaluation.json())
    else:
        print(f"{evaluation.source}: {evaluation.how}")
        print_table(columns(evaluation), rows(evaluation))
    if report is not None:
        from polysilicon.evals.report import render

        write_file(report, render(evaluation))
    if evaluation.failures:
        raise QualityError("; ".join(evaluation.failures))


_Other = tuple[str, Config]


def _on_text(
    model: str,
    config: Config,
    other: _Other | None,
    path: Path,
    cut: Cut,
    thresholds: Sequence[Threshold],
) -> Evaluation:
    text = read_text(path)
    if other is None:
        with session(config, model) as loaded:
            subject, reference = _subject(model, config, loaded), None
            windows = windows_of(loaded, text, cut)
            with progress.pieces("windows", len(windows)) as tick:
                scores = score_text(loaded, windows, tick)
    else:
        # They take turns with one window at a time, and need no KV for more.
        alone = {"max_sequences": 1}
        with (
            session(config.model_copy(update=alone), model) as loaded,
            session(other[1].model_copy(update=alone), other[0]) as second,
        ):
            subject, reference = _subject(model, config, loaded), _subject(*other, second)
            windows = windows_of(loaded, text, cut)
            if windows != windows_of(second, text, cut):
                raise ConfigError(
                    f"{model} and {other[0]} cut the text into different tokens: a reference needs "
                    "the same tokenizer"
                )
            with progress.pieces("windows", len(windows)) as tick:
                scores = compare_text(loaded, second, windows, tick)
    figures = text_figures(scores)
    beginning = "".join(map(loaded.tokenizer.token_text, beginning_of_text(loaded.tokenizer)))
    return Evaluation(
        subject=subject,
        reference=reference,
        source=path.name,
        how=f"{len(scores.logprobs):,} tokens scored {cut.describe(beginning)}",
        figures=figures,
        failures=failures(thresholds, figures),
        scores=scores,
        notable=notable_tokens(scores, windows, loaded.tokenizer),
    )


def _on_tasks(
    model: str,
    config: Config,
    other: _Other | None,
    path: Path,
    thresholds: Sequence[Threshold],
) -> Evaluation:
    tasks: list[Task] = [
        parse_task(line, f"{path}, line {number}") for number, line in read_lines(path)
    ]
    if not tasks:
        raise ConfigError(f"{path} holds no tasks: write one JSON object a line")
    found = []
    subjects = []
    for name, settings in ((model, config), *(() if other is None else (other,))):
        with session(settings, name) as loaded, progress.pieces("tasks", len(tasks)) as tick:
            found.append(run_tasks(loaded, tasks, tick))
            subjects.append(_subject(name, settings, loaded))
    figures = task_figures(*found)
    return Evaluation(
        subject=subjects[0],
        reference=None if other is None else subjects[1],
        source=path.name,
        how=f"{len(tasks):,} tasks, texts generated greedily",
        figures=figures,
        failures=failures(thresholds, figures),
        tasks=tasks,
        outcomes=found[0],
    )


def _subject(model: str, config: Config, loaded: Loaded) -> Subject:
    given = config.model_dump(include=config.model_fields_set & ENGINE_FIELDS)
    return Subject(model=model, backend=loaded.backend, settings=given)


def _thresholds(
    bounds: dict[str, float | None], *, of_text: bool, compared: bool
) -> list[Threshold]:
    """The thresholds that were given. Raises ConfigError for one of what is not measured."""
    found = []
    for option, bound in bounds.items():
        if bound is None:
            continue
        figure, needs_text, needs_reference = _THRESHOLD_FIGURES[option]
        if needs_text is not None and needs_text != of_text:
            raise ConfigError(f"{option} needs {'--text' if needs_text else '--tasks'}")
        if needs_reference and not compared:
            raise ConfigError(f"{option} needs --against REFERENCE")
        found.append(threshold(option, figure, bound, at_least=option.startswith("--min")))
    return found


_THRESHOLD_FIGURES: dict[str, tuple[str, bool | None, bool]] = {
    "--max-perplexity": ("perplexity", True, False),
    "--max-kl": ("mean_kl", True, True),
    "--max-delta": ("mean_delta", True, True),
    "--min-agreement": ("agreement", None, True),
    "--min-accuracy": ("accuracy", False, False),
}
"""By option: the figure; whether it is of a text (True) or of tasks (False); whether it needs a
reference."""


def _reference_config(config: Config, pairs: Sequence[str]) -> Config:
    """The model's configuration with the reference's own options over it.

    Raises ConfigError for an option that engines lack, or a value that does not fit.
    """
    own: dict[str, str | list[str]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        field = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--against-with takes NAME=VALUE, not {pair!r}")
        if field not in ENGINE_FIELDS:
            hint = nearest(field, ENGINE_FIELDS) or ", see `polysilicon eval --help`"
            raise ConfigError(f"--against-with: {name!r} is no engine option{hint}")
        if field in ("backend_option", "block_plugins"):
            values = own.setdefault(field, [])
            assert isinstance(values, list)
            values.append(value.strip())
        else:
            own[field] = value.strip()
    left_out = _OF_THE_WEIGHTS
    if own.keys() & {"backend", "executor"}:
        left_out |= _OF_THE_BACKEND
    given = config.model_dump(include=config.model_fields_set - left_out)
    try:
        return load_config(None, given | own)
    except ConfigError as error:
        raise ConfigError(f"--against-with: {error}") from None


_OF_THE_WEIGHTS = frozenset({"quantization", "quantize"})
_OF_THE_BACKEND = frozenset({"backend", "executor", "device", "backend_option", "activations"})
"""Engine options that a reference does not take over: at all, and with another backend."""


def _check_report(report: Path | None) -> None:
    """Say before the work what could not be written after it."""
    if report is None:
        return
    if report.is_dir() or not report.absolute().parent.is_dir():
        raise ConfigError(f"{report} cannot be written: name a file in a directory that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--report needs matplotlib: pip install 'polysilicon[bench]'")
