"""The HTML page of plans: one file, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib import resources

import jinja2

from polysilicon.backend import Capabilities
from polysilicon.plan import plots
from polysilicon.plan.planner import Plan
from polysilicon.plan.tables import label, notes, rows, sources, summary


def render(plans: Sequence[Plan], backends: Mapping[str, Capabilities]) -> str:
    """The page of plans of one model and load."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("polysilicon.plan").joinpath("report.html").read_text("utf-8")
    return environment.from_string(source).render(
        model=plans[0].model.name,
        summary=summary(plans[0]),
        notes=notes(plans),
        labels=[label(plan) for plan in plans],
        rows=rows(plans, backends),
        memory=_address(plots.memory(plans)),
        against_load=_address(plots.against_load(plans)),
        sources=sources(plans),
    )


def _address(svg: bytes) -> str:
    # An image of its own: the names inside one SVG must not meet those of another.
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
