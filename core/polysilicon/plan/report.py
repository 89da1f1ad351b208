"""The HTML page of plans: one file, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polysilicon import html_page
from polysilicon.backend import Capabilities
from polysilicon.plan import plots
from polysilicon.plan.planner import Plan
from polysilicon.plan.tables import label, notes, rows, sources, summary


def render(plans: Sequence[Plan], backends: Mapping[str, Capabilities]) -> str:
    """The page of plans of one model and load."""
    return html_page.render(
        "polysilicon.plan",
        model=plans[0].model.name,
        summary=summary(plans[0]),
        notes=notes(plans),
        labels=[label(plan) for plan in plans],
        rows=rows(plans, backends),
        memory=html_page.address(plots.memory(plans)),
        against_load=html_page.address(plots.against_load(plans)),
        sources=sources(plans),
    )
