"""What the lanes of continuous integration last said of each backend and executor.

`ci/run NAME` writes a lane's report, and `ci/readme_table.py NAME` keeps it in `reports/`, from
where the README's table and `polysilicon backends --matrix` take what is not known of a backend
that cannot run on the machine at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polysilicon.backend import Capabilities

REPORTS = Path(__file__).parent / "reports"


def kept_reports() -> dict[str, dict[str, Any]]:
    """Reports by the name of the lane, as `ci/report.py` makes them."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))}


def declared(report: Mapping[str, Any]) -> Capabilities | None:
    """What the judged device declared; None for an executor, which declares nothing."""
    if report["capabilities"] is None:
        return None
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in report["capabilities"].items()
    }
    return Capabilities(**values)


def results(report: Mapping[str, Any]) -> str:
    """The lane's tests in words: `882 passed, 62 skipped; own tests 60 passed`."""
    return "; ".join(_in_words(report["runs"]))


def _in_words(runs: list[dict[str, Any]]) -> Iterator[str]:
    kit = [run for run in runs if run["kit"]]
    own = [run for run in runs if not run["kit"] and run["passed"] + len(run["failed"])]
    if kit:
        yield _counts(kit[:1])
    if kit[1:]:
        settings = "one more setting" if len(kit) == 2 else f"{len(kit) - 1} more settings"
        yield f"{settings}: {_counts(kit[1:])}"
    if own:
        yield f"own tests: {_counts(own)}"


def _counts(runs: list[dict[str, Any]]) -> str:
    counts = {
        "failed": sum(len(run["failed"]) for run in runs),
        "passed": sum(run["passed"] for run in runs),
        "expected to fail": sum(len(run["xfailed"]) for run in runs),
        "skipped": sum(sum(run["skipped"].values()) for run in runs),
    }
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
