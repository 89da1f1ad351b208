"""The HTML report of load runs: one file, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from polysilicon import html_page
from polysilicon.bench import plots
from polysilicon.bench.serve import Result
from polysilicon.bench.tables import load_of, remarks, rows


def render(results: Sequence[Result]) -> str:
    """The report of runs that are one workload at several loads, or of one run."""
    figures = results[0].figures
    settings = {name: figures[name] for name in _SETTINGS if figures.get(name) is not None}
    if "goodput" in settings:
        bounds = settings["goodput"].items()
        settings["goodput"] = " ".join(f"{name}:{ms:g}" for name, ms in bounds if ms is not None)
    rated = len(results) > 1 and all(result.figures["request_rate"] != "inf" for result in results)
    return html_page.render(
        "polysilicon.bench",
        model=figures["model_id"],
        date=figures["date"],
        settings=settings,
        loads=[load_of(result) for result in results],
        rows=rows(results),
        remarks=remarks(results),
        against_load=html_page.address(plots.latency_against_load(results)) if rated else None,
        runs=[
            {
                "load": load_of(result),
                "histograms": html_page.address(plots.histograms(result)),
                "timelines": html_page.address(plots.timelines(result)),
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
