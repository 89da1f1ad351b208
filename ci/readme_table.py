#!/usr/bin/env python3
"""Write the README's table of backends from the kept reports of the lanes, and keep new ones:
`ci/readme_table.py [NAME...]` takes the last reports of these lanes, which `ci/run NAME` made.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from report import ARTEFACTS

from polysilicon.format_matrix import formats
from polysilicon.lane_reports import REPORTS, declared, kept_reports, results

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- ci/readme_table.py -->\n", "<!-- end -->\n"
CHOOSES_NO_TESTS = re.compile(r"-q|-v+|-p|no:\w+|--durations=\d+")
HEAD = ("lane", "device", "shows", "tests", "formats", "SmolLM2, tokens/s", "date")


def keep(name: str) -> None:
    """Take a lane's last report. Exits where there is none, or one of a part of the tests."""
    path = ARTEFACTS / f"report-{name}.json"
    if not path.exists():
        sys.exit(f"{name} has no report: make one with ci/run {name}")
    report = json.loads(path.read_text())
    choosing = [given for given in report["arguments"] if not CHOOSES_NO_TESTS.fullmatch(given)]
    if choosing:
        given = " ".join(choosing)
        sys.exit(f"{name} was run with {given}: make a report of the whole lane, ci/run {name}")
    REPORTS.mkdir(exist_ok=True)
    # The formats follow from what the device declares.
    del report["formats"]
    kept = json.dumps(report | {"arguments": choosing}, indent=1)
    (REPORTS / path.name.removeprefix("report-")).write_text(kept + "\n")


def table(reports: dict[str, dict[str, Any]], lanes: list[str]) -> str:
    """The README's rows, in the order of the lanes."""
    rows = [HEAD, ["---"] * len(HEAD)]
    rows += [_row(name, reports[name]) if name in reports else _none(name) for name in lanes]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _none(name: str) -> list[str]:
    return [f"`{name}`", "no report yet", *[""] * (len(HEAD) - 2)]


def _row(name: str, report: dict[str, Any]) -> list[str]:
    device = declared(report)
    support = Counter([str(item.support(device)) for item in formats()] if device else [])
    supported = [f"{support[kind]} {kind}" for kind in ("native", "transcoded") if support[kind]]
    speed = [
        f"batch {load['batch']}: prefill {load['prefill_tokens_per_s']:,.0f}, "
        f"decode {load['decode_tokens_per_s']:,.0f}"
        for load in report["speed"]
    ]
    return [
        f"`{name}`", report["device"] or report["platform"], ", ".join(report["shows"]),
        results(report), ", ".join(supported), "; ".join(speed), report["date"],
    ]  # fmt: skip


def written(readme: str) -> str:
    """The README with the table of the kept reports in the place of the one it has."""
    matrix = json.loads((ROOT / "ci" / "matrix.json").read_text())
    lanes = [lane.get("backend") or lane["executor"] for lane in matrix["lanes"]]
    new = f"{BEGIN}{table(kept_reports(), lanes)}{END}"
    found = re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: new, readme, flags=re.S)
    assert new in found, f"README.md has no {BEGIN.strip()} and {END.strip()}"
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        keep(name)
    (ROOT / "README.md").write_text(written((ROOT / "README.md").read_text()))
