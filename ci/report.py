"""The report with which a lane ends: tests, capabilities, formats and figures; JSON and a table."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARTEFACTS = Path(__file__).resolve().parent / "artefacts"
REAL_DEVICE = "real device"
LOAD = {"--prompt-tokens": "128", "--output-tokens": "16", "--batch": "1", "--repeats": "3"}
"""Of the short measurement through the engine."""

MOST_SECONDS = 300
"""For that measurement: where it takes longer, the report does without."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A command of a lane and what came of it. kit: whether it is the conformance kit.
    skipped: numbers of tests by reason; xfailed: reasons by test; failed: names of tests; figures:
    what tests recorded as properties, by test."""

    command: str
    kit: bool
    status: int
    seconds: float
    passed: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    xfailed: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: tuple[str, ...] = ()
    figures: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)


def outcomes(results: Path) -> dict[str, Any]:
    """Fields of a `Run` from what pytest wrote as JUnit XML; none where it wrote nothing."""
    if not results.exists():
        return {"failed": ("pytest itself",)}
    passed, failed, figures, xfailed = 0, [], {}, {}
    skipped: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        test = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if found := {p.get("name", ""): p.get("value", "") for p in case.iter("property")}:
            figures[test] = found
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(test)
        elif skip is None:
            passed += 1
        elif skip.get("type") == "pytest.xfail":
            xfailed[test] = skip.get("message", "")
        else:
            skipped[_reason(skip)] += 1
    # Of a test whose teardown fails as well there are two.
    failed = list(dict.fromkeys(failed))
    return {
        "passed": passed, "skipped": dict(skipped), "xfailed": xfailed,
        "failed": tuple(failed), "figures": figures,
    }  # fmt: skip


def _reason(skip: ElementTree.Element) -> str:
    """Why a test, or a whole module, was skipped."""
    message = skip.get("message", "")
    whole = re.search(r"Skipped: (.*)['\"]\)\s*$", skip.text or "", flags=re.S)
    return whole.group(1) if message == "collection skipped" and whole else message


def make(
    name: str, lane: dict[str, Any], judged: tuple[str, Sequence[str]] | None, runs: list[Run],
    arguments: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """A lane's report. judged: the backend (`NAME` or `MODULE:NAME`) whose device the kit judged,
    and its options; arguments: what was passed on to pytest, with which the report may be one of
    fewer tests."""
    facts = {"device": None, "details": {}, "capabilities": None, "formats": []}
    shows = list(lane["shows"])
    if judged is not None:
        try:
            facts, stand_in = _device(*judged)
        except Exception as error:
            # What the tests found is worth a report all the more.
            facts["device"], stand_in = f"cannot be opened: {error}", True
        if not stand_in and REAL_DEVICE not in shows:
            shows.insert(0, REAL_DEVICE)
    return {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "version": importlib.metadata.version("polysilicon"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "shows": shows,
        **facts,
        "arguments": list(arguments),
        "runs": [dataclasses.asdict(run) for run in runs],
        "speed": _speed(name) if judged is not None and judged[0] == name else [],
    }


def _device(judged: str, options: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """The first device, its capabilities and the formats it runs; whether it is a stand-in."""
    from polysilicon.format_matrix import formats
    from polysilicon.plugins import load_plugins

    module, separator, name = judged.rpartition(":")
    candidates = load_plugins().backends
    if separator:
        candidates = importlib.import_module(module).polysilicon_backends()
    (backend,) = (candidate for candidate in candidates if candidate.name == name)
    info = backend.probe()[0]
    device = backend.open(0, dict(option.split("=", 1) for option in options))
    try:
        declared = device.capabilities
    finally:
        device.close()
    supported = [
        {"container": f.container, "type": f.type, "support": f.support(declared)}
        for f in formats()
    ]
    return {
        "device": info.name,
        "details": dict(info.details),
        "capabilities": dataclasses.asdict(declared),
        "formats": supported,
    }, info.stand_in


def _speed(name: str) -> list[dict[str, Any]]:
    """Tokens/s of SmolLM2 through the engine, by batch; nothing where it cannot be measured."""
    model = os.environ.get("POLYSILICON_TEST_SMOLLM2", "smollm2")
    command = [
        sys.executable, "-c", "from polysilicon.cli import main; main()", "bench", "throughput",
        model, "--backend", name, "--json", *(word for pair in LOAD.items() for word in pair),
    ]  # fmt: skip
    try:
        said = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, timeout=MOST_SECONDS
        ).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"== {name}: not measured: {error}", file=sys.stderr)
        return []
    return [json.loads(said)]


def write(report: dict[str, Any]) -> Path:
    """Into the folder of what lanes leave behind."""
    ARTEFACTS.mkdir(exist_ok=True)
    path = ARTEFACTS / f"report-{report['name']}.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return path


def table(report: dict[str, Any]) -> str:
    """A report as lines of text."""
    rows = [("shows", ", ".join(report["shows"])), ("device", report["device"] or "-")]
    rows += list(report["details"].items())
    for run in report["runs"]:
        rows.append(("run", run["command"]))
        rows.append(("", f"passed {run['passed']}, {run['seconds']:.0f} s, status {run['status']}"))
        rows += [("", f"failed: {test}") for test in run["failed"]]
        rows += [("", f"expected to fail: {test}: {why}") for test, why in run["xfailed"].items()]
        rows += [("", f"skipped {count}: {why}") for why, count in run["skipped"].items()]
        for test, found in run["figures"].items():
            rows.append(
                ("", f"{test}: {', '.join(f'{key} {value}' for key, value in found.items())}")
            )
    rows += [
        ("declares", f"{key} {value}") for key, value in (report["capabilities"] or {}).items()
    ]
    kinds: dict[str, list[str]] = {}
    for entry in report["formats"]:
        kinds.setdefault(str(entry["support"]), []).append(f"{entry['container']} {entry['type']}")
    rows += [(support, ", ".join(names)) for support, names in kinds.items()]
    for load in report["speed"]:
        prefill, decode = load["prefill_tokens_per_s"], load["decode_tokens_per_s"]
        rows.append((
            f"SmolLM2, batch {load['batch']}",
            f"prefill {prefill:.0f} tokens/s, decode {decode:.0f}",
        ))  # fmt: skip
    width = max(len(key) for key, _ in rows)
    return "\n".join(f"{key:{width}}  {value}" for key, value in rows)
