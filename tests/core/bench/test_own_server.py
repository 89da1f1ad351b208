"""`polysilicon bench serve` on `polysilicon serve`: both tell the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request

import pytest

from polysilicon.testing.tiny_models import VOCABULARY, tiny_llama
from polysilicon.testing.tiny_text import write_text_side

METRIC = re.compile(r"polysilicon:(\w+_(?:sum|count|total))\{[^}]*\} (\S+)")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_llama().write(folder)
    write_text_side(folder)
    code = "from polysilicon.cli import main; main()"
    arguments = ["serve", str(folder), "--backend", "reference", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    found = None
    said = ""
    for line in process.stderr:
        said += line
        found = re.search(r"serving .* on (http://\S+)", line)
        if found:
            break
    assert found, said
    yield found[1]
    process.terminate()
    process.communicate()
    watchdog.cancel()


def counters(url):
    """Sums and counts of the server's metrics, over all their labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    totals = {}
    for name, value in METRIC.findall(text):
        totals[name] = totals.get(name, 0) + float(value)
    return totals


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_figures_are_those_of_the_servers_own_metrics(bench, url, endpoint):
    arguments = ["--endpoint", endpoint, "--vocab-size", VOCABULARY, "--prompt-tokens", 24]
    arguments += ["--output-tokens", 12, "--range-ratio", 0.5, "--shared-prefix", 4, "--json"]
    before = counters(url)
    status, out, err = bench("--url", url, *arguments, "--num-prompts", 25)
    assert status == 0
    assert ("token ids are not taken" in err) is (endpoint == "chat")
    figures = json.loads(out)
    assert figures["completed"] == 25
    assert figures["tokens_counted_by"] == "usage"
    assert figures["prompts"] == ("ids" if endpoint == "completions" else "text")
    after = counters(url)
    took = {name: after[name] - before.get(name, 0) for name in after}
    # One request more is the probe, of 24 token ids where the endpoint takes them.
    assert took["e2e_request_latency_seconds_count"] == 26
    assert took["generation_tokens_total"] == figures["total_output_tokens"] + 2
    if endpoint == "completions":
        assert took["prompt_tokens_total"] == figures["total_input_tokens"] + 24
        assert took["prefix_cache_hits_total"] == figures["total_cached_tokens"]
    # The client sees the ways there and back too, the server the probe.
    for ours, theirs in (("e2el", "e2e_request_latency"), ("ttft", "time_to_first_token")):
        seconds = figures[f"mean_{ours}_ms"] * 25 / 1e3
        assert seconds == pytest.approx(took[f"{theirs}_seconds_sum"], rel=0.5, abs=2.0)
