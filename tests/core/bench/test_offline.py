"""`polysilicon bench latency` and `throughput` on a tiny model and the reference device."""

from __future__ import annotations

import json
import re

import pytest


def test_figures_of_one_stream_agree_with_each_other(offline):
    lengths = ["--prompt-tokens", "9", "--output-tokens", "4", "--json"]
    status, out, _ = offline("latency", *lengths)
    assert status == 0
    figures = json.loads(out)
    assert figures["batch"] == 1
    # Of two repeats the median is the mean, of times and of rates.
    assert figures["mean_ttft_ms"] == pytest.approx(figures["median_ttft_ms"])
    ttfts = [figures["mean_ttft_ms"] + sign * figures["std_ttft_ms"] for sign in (1, -1)]
    rates = [9e3 / ttft for ttft in ttfts]
    assert figures["prefill_tokens_per_s"] == pytest.approx(sum(rates) / 2)
    tpots = [figures["mean_tpot_ms"] + sign * figures["std_tpot_ms"] for sign in (1, -1)]
    rates = [1e3 / tpot for tpot in tpots]
    assert figures["decode_tokens_per_s"] == pytest.approx(sum(rates) / 2)
    total = figures["mean_ttft_ms"] + 3 * figures["mean_tpot_ms"]
    assert figures["mean_e2el_ms"] == pytest.approx(total)


def test_lists_are_measured_in_every_combination(offline):
    lengths = ["--prompt-tokens", "5,3", "--output-tokens", "2", "--batch", "1,2"]
    status, out, _ = offline("latency", *lengths, "--json")
    assert status == 0
    loads = [(row["batch"], row["prompt_tokens"]) for row in json.loads(out)]
    assert loads == [(1, 5), (1, 3), (2, 5), (2, 3)]
    status, out, _ = offline("throughput", *lengths)
    assert status == 0
    header, *rows = out.splitlines()
    assert "decode_tokens_per_s" in header
    assert [row.split()[:3] for row in rows if row.strip()[:1].isdigit()] == [
        ["5", "2", "1"],
        ["3", "2", "1"],
        ["5", "2", "2"],
        ["3", "2", "2"],
    ]


def test_throughput_reports_its_load_and_its_figures(offline):
    load = ["--batch", "2", "--prompt-tokens", "9", "--output-tokens", "4", "--shared-prefix", "3"]
    status, out, _ = offline("throughput", *load, "--json")
    assert status == 0
    figures = json.loads(out)
    assert figures["batch"] == 2
    assert figures["prompt_tokens"] == 9
    assert 0 < figures["core_ms_per_step"] < figures["step_ms"]
    assert figures["prefill_tokens_per_s"] > 0


def test_both_sequences_run_in_every_step(offline):
    load = ["--batch", "2", "--prompt-tokens", "9", "--output-tokens", "4", "--repeats", "1"]
    _, out, _ = offline("throughput", *load, "--json")
    figures = json.loads(out)
    assert figures["decode_tokens_per_s"] == pytest.approx(2e3 / figures["step_ms"], rel=0.01)


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_a_terminal_sees_how_far_it_is(offline, command, monkeypatch):
    monkeypatch.setattr("polysilicon.progress._REFRESH_SECONDS", 0)
    load = ["--batch", "1,2", "--prompt-tokens", "3", "--output-tokens", "2", "--repeats", "1"]
    _, _, err = offline(command, *load)
    assert "runs" not in err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    _, _, err = offline(command, *load)
    counts = re.findall(r" (\d/4) ", err)
    assert list(dict.fromkeys(counts)) == ["0/4", "1/4", "2/4", "3/4", "4/4"]


@pytest.mark.parametrize("command", ["latency", "throughput"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-tokens", "0"), "--prompt-tokens"),
        (("--output-tokens", "3,"), "--output-tokens"),
        (("--batch", "x"), "--batch"),
        (("--batch", "65", "--prompt-tokens", "2"), "--max-sequences 65"),
        (("--prompt-tokens", "9000"), "--max-length"),
        (("--prompt-tokens", "5", "--shared-prefix", "5"), "--shared-prefix"),
        (("--output-tokens", "1"), "output-tokens"),
    ],
)
def test_loads_that_cannot_run_name_the_mend(offline, command, arguments, message):
    status, out, err = offline(command, *arguments)
    assert status == 2
    assert out == ""
    assert message in err
