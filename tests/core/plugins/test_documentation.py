"""The authors' documentation and the hook specifications say the same."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from polysilicon import hookspecs
from polysilicon.plugin_checks import PluginStatus
from polysilicon.plugins import RESTRICTION

README = Path(__file__).parents[3] / "plugins" / "README.md"


def table(heading: str) -> dict[str, str]:
    """First to second column of the table with this heading in its first column."""
    lines = README.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, second = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first.strip("`")] = second.strip("`")
    return rows


def test_the_hooks() -> None:
    hooks = {
        name: str(inspect.signature(value).return_annotation)
        for name, value in vars(hookspecs).items()
        if hasattr(value, "polysilicon_spec")
    }
    assert hooks
    assert table("hook") == hooks
    assert all(getattr(hookspecs, name).__doc__ for name in hooks)


def test_the_statuses() -> None:
    assert list(table("status")) == [str(status) for status in PluginStatus]


def test_the_variable() -> None:
    assert set(re.findall(r"POLYSILICON_\w+", README.read_text())) == {RESTRICTION}
