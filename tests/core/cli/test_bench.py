"""`polysilicon bench` on the default model and the reference backend."""

from __future__ import annotations

import json

import pytest

from polysilicon.cli import run


@pytest.fixture
def bench(capsys, smollm2_path):
    def call(*arguments: str) -> tuple[int, str, str]:
        command = ["bench", "throughput", str(smollm2_path), "--backend", "reference"]
        status = run([*command, "--repeats", "1", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_throughput_reports_its_load_and_its_figures(bench):
    load = ["--batch", "2", "--prompt-tokens", "9", "--output-tokens", "4", "--shared-prefix", "3"]
    status, out, _ = bench(*load, "--json")
    assert status == 0
    figures = json.loads(out)
    assert figures["batch"] == 2
    assert figures["prompt_tokens"] == 9
    assert 0 < figures["core_ms_per_step"] < figures["step_ms"]
    # Both sequences run in every step.
    assert figures["decode_tokens_per_s"] == pytest.approx(2e3 / figures["step_ms"], rel=0.01)
    assert figures["prefill_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-tokens", "9000"), "--max-length"),
        (("--batch", "65", "--prompt-tokens", "2"), "--max-sequences 65"),
        (("--prompt-tokens", "5", "--shared-prefix", "5"), "--shared-prefix"),
        (("--output-tokens", "1"), "output-tokens"),
    ],
)
def test_loads_that_cannot_run_name_the_mend(bench, arguments, message):
    status, out, err = bench(*arguments)
    assert status == 2
    assert out == ""
    assert message in err
