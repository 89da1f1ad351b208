"""The kit itself: it finds every defect of the wrong devices, where it says that it looks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

EXPECTED = {
    "attention-scale": "test_attention::test_scale",
    "window": "test_attention::test_window",
    "kv-scales": "test_attention::test_calibrated_scales",
    "stale-page": "test_attention_pages::test_rewritten_slots",
    "bfloat16-products": "test_linear::test_bias",
    "bfloat16-residual": "test_elementwise::test_residual_stream_is_float32",
    "adapter-slot": "test_adapters::test_mixed_batch",
    "routing-ties": "test_moe::test_equal_scores_prefer_the_lower_expert",
    "page-layout": "test_kv_pool::test_attention_writes_the_canonical_layout",
    "token-source": "test_steps::test_tokens_from_the_step_before",
    "noise-position": "test_sampling::test_draws_follow_the_generator",
    "weights-kept": "test_linear::test_given_arrays_are_not_kept",
    "batch-dependence": "test_device::test_deterministic_products",
}
"""The test that is meant for each defect."""

SOUND = ("none", "row-by-row")


def run_kit(tests: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Tests of the kit, run as a plugin author runs it."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", *arguments),
            *(
                "--pyargs",
                *(f"polysilicon.testing.conformance.{test}".rstrip(".") for test in tests),
            ),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OPENBLAS_NUM_THREADS": "1"},
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without settings, to run in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_every_defect_is_found(folder: Path) -> None:
    """Each wrong device fails the test that is meant for it and passes others; the sound ones
    pass all."""
    names = (*SOUND, *EXPECTED)
    backends = [f"--polysilicon-backend=wrong:{name}" for name in names]
    report = folder / "report.xml"
    finished = run_kit(list(EXPECTED.values()), *backends, f"--junitxml={report}")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    passed, failed = defaultdict(set), defaultdict(set)
    for case in ElementTree.parse(report).iter("testcase"):
        test, _, parameters = case.attrib["name"].partition("[wrong:")
        assert case.find("error") is None, case.attrib["name"]
        if case.find("skipped") is not None:
            continue
        name = max((name for name in names if parameters.startswith(name)), key=len)
        (passed if case.find("failure") is None else failed)[name].add(test)
    meant = {name: test.partition("::")[2] for name, test in EXPECTED.items()}
    assert not failed["none"]
    assert not failed["row-by-row"]
    assert passed["row-by-row"] == set(meant.values())
    for name, test in meant.items():
        assert test in failed[name], f"the kit does not find {name}"
        assert passed[name], f"{name} breaks everything, so that nothing is shown"


def test_sound_device_of_another_kind_passes(folder: Path) -> None:
    """Half precision and few capabilities: the bounds hold, and what is not declared is skipped."""
    finished = run_kit(
        [""], "--polysilicon-backend=wrong:modest", "--ignore-glob=/*/test_engine*.py", "-rs"
    )
    assert finished.returncode == 0, finished.stdout
    for words in (
        "no adapters",
        "no tree attention",
        "no calibrated KV scales",
        "no determinism",
        "no encoding dense:f32",
    ):
        assert f"declares {words}" in finished.stdout


def test_expected_failures(folder: Path) -> None:
    """Declared failures are no failures, undeclared ones are, and a declared one that passes is."""
    (folder / "pytest.ini").write_text(
        "[pytest]\n"
        "polysilicon_backends = wrong:attention-scale\n"
        "polysilicon_xfail =\n"
        "    test_attention.py::test_scale[*]: the scale is rounded\n"
        "    test_linear.py::test_bias[*-3]: no such defect\n"
    )
    finished = run_kit(["test_attention::test_scale"], "-rx")
    assert finished.returncode == 0, finished.stdout
    assert "the scale is rounded" in finished.stdout
    finished = run_kit(["test_linear::test_bias"])
    assert finished.returncode == 1, finished.stdout
    assert "XPASS(strict)" in finished.stdout
    assert "1 failed, 1 passed" in finished.stdout
    assert run_kit(["test_attention::test_bidirectional"]).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name it with --polysilicon-backend NAME"),
        (["--polysilicon-backend=no-such"], "no backend is called 'no-such'"),
        (["--polysilicon-backend=wrong:no-such"], "no backend is called 'wrong:no-such'"),
        (["--polysilicon-backend=wrong:none", "--polysilicon-device=7"], "has 1 devices"),
    ],
)
def test_what_cannot_be_judged_is_an_error(folder: Path, arguments: list[str], words: str) -> None:
    finished = run_kit(["test_linear::test_bias"], *arguments)
    assert finished.returncode == 1
    assert words in finished.stdout
    assert "2 errors" in finished.stdout


def test_a_seed_gives_the_same_inputs(folder: Path) -> None:
    """A failure prints its seed, and with it the failure is the same."""
    backend = "--polysilicon-backend=wrong:bfloat16-products"
    first = run_kit(["test_linear::test_bias"], backend, "--tb=short")
    seed = first.stdout.partition("--polysilicon-seed ")[2].split()[0]
    again = run_kit(["test_linear::test_bias"], backend, "--polysilicon-seed", seed)
    other = run_kit(["test_linear::test_bias"], backend, "--polysilicon-seed", f"{seed}1")
    errors = [re.findall(r"error (\S+) of", run.stdout) for run in (first, again, other)]
    assert errors[0]
    assert set(errors[0]) == set(errors[1])
    assert set(errors[0]) != set(errors[2])
