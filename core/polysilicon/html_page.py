"""HTML pages of one file each, which load nothing from elsewhere: what reports have in common."""

from __future__ import annotations

import base64
from importlib import resources

import jinja2


def render(package: str, **values: object) -> str:
    """`report.html` of a package, filled in; a value that it names and lacks is an error."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files(package).joinpath("report.html").read_text("utf-8")
    return environment.from_string(source).render(values)


def address(svg: bytes) -> str:
    """An SVG as the address of an image of its own: names inside one must not meet another's."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
