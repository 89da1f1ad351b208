"""What lanes report, the README's table that is made of it, and the workflow behind the matrix."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from polysilicon.lane_reports import declared, kept_reports, results

ROOT = Path(__file__).parents[2]
MATRIX = json.loads((ROOT / "ci" / "matrix.json").read_text())
LANES = {lane.get("backend") or lane["executor"]: lane for lane in MATRIX["lanes"]}
SHOWN = {"real device", "emulation", "interpreter", "ahead-of-time compile"}

TESTS = """
import pytest

def test_passes(record_property):
    record_property("mean_difference", 0.25)

@pytest.mark.parametrize("x", [1, 2])
def test_skips(x):
    pytest.skip("declares no x")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail():
    assert False

@pytest.mark.xfail(reason="known", strict=True)
def test_unexpectedly_passes():
    pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError

def test_fails(broken):
    assert False

def test_fails_in_teardown(broken):
    pass
"""
SKIPPED_WHOLE = """
import pytest

pytest.importorskip("no_such_vendor", reason="no_such_vendor isn't installed: pip install it")
"""


@pytest.fixture(scope="module")
def ci() -> Iterator[None]:
    """The modules in the folder of that name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "ci")
        yield


@pytest.fixture(scope="module")
def report(ci: None) -> ModuleType:
    return importlib.import_module("report")


@pytest.fixture(scope="module")
def readme_table(ci: None) -> ModuleType:
    return importlib.import_module("readme_table")


@pytest.fixture(scope="module")
def outcomes(report: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run in which everything occurs."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "test_all.py").write_text(TESTS)
    (folder / "test_whole.py").write_text(SKIPPED_WHOLE)
    command = [sys.executable, "-m", "pytest", "-pno:cacheprovider"]
    junit = ["--junitxml=results.xml", "-ojunit_family=xunit1"]
    subprocess.run([*command, *junit], cwd=folder, capture_output=True, check=False, timeout=60)
    return report.outcomes(folder / "results.xml")


def test_outcomes(outcomes: dict[str, Any]) -> None:
    assert outcomes["passed"] == 1
    assert outcomes["skipped"] == {
        "declares no x": 2, "no_such_vendor isn't installed: pip install it": 1
    }  # fmt: skip
    assert outcomes["xfailed"] == {"test_all::test_expected_to_fail": "known"}
    assert sorted(outcomes["failed"]) == [
        "test_all::test_fails", "test_all::test_fails_in_teardown",
        "test_all::test_unexpectedly_passes",
    ]  # fmt: skip
    assert outcomes["figures"] == {"test_all::test_passes": {"mean_difference": "0.25"}}


def test_a_run_that_wrote_nothing_has_failed(report: ModuleType, tmp_path: Path) -> None:
    assert report.outcomes(tmp_path / "results.xml")["failed"]


@pytest.fixture
def made(
    report: ModuleType, outcomes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    """The report of a lane over the reference, as it is written and read again."""
    speed = [{"batch": 8, "prefill_tokens_per_s": 1234.5, "decode_tokens_per_s": 67.8}]
    monkeypatch.setattr(report, "ARTEFACTS", tmp_path)
    monkeypatch.setattr(report, "_speed", lambda name: speed)
    fields = {"kit": True, "status": 1, "seconds": 2.5, **outcomes}
    run = report.Run(command="pytest all", **fields)
    made = report.make("reference", {"shows": ["emulation"]}, ("reference", []), [run], ["-x"])
    path = report.write(made)
    assert path == tmp_path / "report-reference.json"
    return json.loads(path.read_text())


def test_the_report(report: ModuleType, made: dict[str, Any]) -> None:
    from polysilicon.reference.device import ReferenceDevice

    assert made["device"] == "numpy"
    assert made["shows"] == ["real device", "emulation"]
    assert declared(made) == ReferenceDevice().capabilities
    assert {"container": "gguf", "type": "Q4_K", "support": "native"} in made["formats"]
    assert results(made) == "3 failed, 1 passed, 1 expected to fail, 3 skipped"
    lines = [" ".join(line.split()) for line in report.table(made).splitlines()]
    for line in (
        "shows real device, emulation", "device numpy", "run pytest all",
        "failed: test_all::test_fails", "skipped 2: declares no x",
        "expected to fail: test_all::test_expected_to_fail: known",
        "test_all::test_passes: mean_difference 0.25", "declares compute f32",
        "SmolLM2, batch 8 prefill 1234 tokens/s, decode 68",
    ):  # fmt: skip
        assert line in lines, line


def test_a_device_that_cannot_be_opened(report: ModuleType) -> None:
    """Its tests are reported all the same."""
    run = report.Run(command="pytest", kit=True, status=1, seconds=1, failed=("t::a",))
    made = report.make("reference", {"shows": ["emulation"]}, ("no_such_vendor:x", []), [run], [])
    assert made["device"] == "cannot be opened: No module named 'no_such_vendor'"
    assert made["shows"] == ["emulation"]
    assert results(made) == "1 failed"


def test_an_executor_declares_nothing(report: ModuleType) -> None:
    made = report.make("llamacpp", {"shows": ["real device"]}, None, [], [])
    assert declared(made) is None
    assert made["speed"] == made["formats"] == []
    assert "shows" in report.table(made)


def test_a_report_of_a_part_is_not_kept(
    readme_table: ModuleType, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setattr(readme_table, "ARTEFACTS", tmp_path)
    monkeypatch.setattr(readme_table, "REPORTS", kept)
    with pytest.raises(SystemExit, match=r"ci/run reference$"):
        readme_table.keep("reference")
    with pytest.raises(SystemExit, match="has no report"):
        readme_table.keep("cpu")
    assert not kept.exists()
    (tmp_path / "report-reference.json").write_text(json.dumps(made | {"arguments": []}))
    readme_table.keep("reference")
    assert json.loads((kept / "reference.json").read_text())["device"] == "numpy"


def test_the_table(readme_table: ModuleType, made: dict[str, Any]) -> None:
    _, _, row, none = readme_table.table({"reference": made}, ["reference", "cpu"]).splitlines()
    native = sum(entry["support"] == "native" for entry in made["formats"])
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "`reference`", "numpy", "real device, emulation", results(made), f"{native} native",
        "batch 8: prefill 1,234, decode 68", made["date"],
    ]  # fmt: skip
    assert none.startswith("| `cpu` | no report yet |")


def test_the_readme_holds_the_kept_reports(readme_table: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme_table.written(readme) == readme, "run python ci/readme_table.py"


def test_the_kept_reports() -> None:
    """Whole ones, of lanes that there are."""
    reports = kept_reports()
    assert reports.keys() <= LANES.keys()
    for name, report in reports.items():
        assert report["name"] == name
        assert report["arguments"] == []
        assert set(report["shows"]) <= SHOWN
        assert report["runs"]
        assert (declared(report) is None) == ("executor" in LANES[name])


def test_the_matrix_says_what_lanes_show() -> None:
    for lane in LANES.values():
        assert lane["shows"]
        assert set(lane["shows"]) <= SHOWN
        assert lane["runner"]
        assert lane["extra"]


def test_the_workflow_runs_the_matrix() -> None:
    """What it asks of a lane is there, and optional only under a condition."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    read = "\n".join(step.get("run", "") for step in jobs["matrix"]["steps"])
    assert all(f"jq -c '{query}' ci/matrix.json" in read for query in (".python", ".lanes"))
    assert (
        jobs["test"]["strategy"]["matrix"]["python"]
        == "${{ fromJSON(needs.matrix.outputs.python) }}"
    )
    assert "[.lanes[] | select(.device_runner)]" in read
    optional = {"backend", "executor", "install", "packages", "device_runner"}
    for job, lanes in (("lane", "lanes"), ("device", "device_lanes")):
        steps = jobs[job]["steps"]
        assert (
            jobs[job]["strategy"]["matrix"]["lane"]
            == f"${{{{ fromJSON(needs.matrix.outputs.{lanes}) }}}}"
        )
        assert any("ci/run ${{ matrix.lane.backend" in step.get("run", "") for step in steps)
        for step in steps:
            for field in re.findall(r"matrix\.lane\.(\w+)", step.get("run", "")):
                assert field in optional or all(field in lane for lane in LANES.values())
                if field in ("install", "packages"):
                    assert step["if"] == f"matrix.lane.{field}"
