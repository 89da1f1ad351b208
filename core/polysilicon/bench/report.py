"""The HTML report of load runs: one file, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import resources

import jinja2

from polysilicon.bench import plots
from polysilicon.bench.serve import Result
from polysilicon.bench.tables import load_of, remarks, rows


def render(results: Sequence[Result]) -> str:
    """The report of runs that are one workload at several loads, or of one run."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("polysilicon.bench").joinpath("report.html").read_text("utf-8")
    figures = results[0].figures
    settings = {name: figures[name] for name in _SETTINGS if figures.get(name) is not None}
    if "goodput" in settings:
        bounds = settings["goodput"].items()
        settings["goodput"] = " ".join(f"{name}:{ms:g}" for name, ms in bounds if ms is not None)
    rated = len(results) > 1 and all(result.figures["request_rate"] != "inf" for result in results)
    return environment.from_string(source).render(
        model=figures["model_id"],
        date=figures["date"],
        settings=settings,
        loads=[load_of(result) for result in results],
        rows=rows(results),
        remarks=remarks(results),
        against_load=_address(plots.latency_against_load(results)) if rated else None,
        runs=[
            {
                "load": load_of(result),
                "histograms": _address(plots.histograms(result)),
                "timelines": _address(plots.timelines(result)),
            }
            for result in results
            if result.figures["completed"]
        ],
    )


_SETTINGS = (
    "url",
    "endpoint_type",
    "workload",
    "prompts",
    "num_prompts",
    "arrivals",
    "burstiness",
    "max_concurrency",
    "goodput",
    "seed",
)


def _address(svg: bytes) -> str:
    # An image of its own: the names inside one SVG must not meet those of another.
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
