import json
import logging
import re
import time
from importlib import resources

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.health import Health
from polysilicon.engine.stats import EngineStats
from polysilicon.kv.groups import GroupUsage
from polysilicon.request import (
    SLO,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimes,
    SamplingParams,
)
from polysilicon.server import dashboard, history, metrics, request_log, tracking
from polysilicon.server.traces import Traces

FACTS = ModelFacts(
    max_length=128,
    vocab_size=100,
    page_size=16,
    kv_pages=7,
    max_sequences=4,
    eos_ids=frozenset(),
    memory={"weights": 1000, "kv": 24},
)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now + 1e9


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (tracking, history, dashboard):
        monkeypatch.setattr(module, "time", clock)
    return clock


def request(name="a", prompt=5, slo=None, **params):
    params = SamplingParams(**{"max_tokens": 9} | params)
    return Request(id=name, prompt=tuple(range(prompt)), params=params, slo=slo)


def serve(tracker, clock, asked, *, ttft, gaps, reason=FinishReason.LENGTH, choice=0, times=None):
    """Have a choice of a request answered with one token at `ttft` and more after `gaps`."""
    clock.now += ttft
    gaps = list(gaps)
    for index in range(len(gaps) + 1):
        last = index == len(gaps)
        output = RequestOutput(
            request_id=asked.id,
            choice=choice,
            ids=(index,),
            num_cached_tokens=0 if index else 3,
            finish_reason=reason if last else None,
            times=times if last else None,
        )
        tracker.news(output)
        if not last:
            clock.now += gaps[index]


def samples(made):
    """Every sample of an exposition by name and labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(made.exposition().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


@pytest.fixture
def made():
    made = metrics.Metrics("tiny")
    made.describe(FACTS, "bf16")
    return made


def test_times_and_tokens_of_a_request_are_counted_once(made, clock):
    tracker = tracking.Tracker([made], SLO())
    asked = request(prompt=12)
    tracker.submitted(asked)
    times = RequestTimes(arrival=100.0, first_scheduled=100.125, first_token=100.5, finished=101.25)
    serve(tracker, clock, asked, ttft=0.5, gaps=[0.25, 0.5], times=times)
    assert not list(tracker.running)
    found = samples(made)
    for name, count, total in [
        ("time_to_first_token_seconds", 1, 0.5),
        ("inter_token_latency_seconds", 2, 0.75),
        ("request_time_per_output_token_seconds", 1, 0.375),
        ("e2e_request_latency_seconds", 1, 1.25),
        ("request_queue_time_seconds", 1, 0.125),
        ("request_prefill_time_seconds", 1, 0.375),
        ("request_decode_time_seconds", 1, 0.75),
        ("request_inference_time_seconds", 1, 1.125),
        ("request_prompt_tokens", 1, 12),
        ("request_generation_tokens", 1, 3),
        ("request_params_max_tokens", 1, 9),
        ("request_params_n", 1, 1),
    ]:
        assert found[f"polysilicon:{name}_count", ()] == count, name
        assert found[f"polysilicon:{name}_sum", ()] == pytest.approx(total), name
    assert found["polysilicon:prompt_tokens_total", ()] == 12
    assert found["polysilicon:generation_tokens_total", ()] == 3
    assert found["polysilicon:request_success_total", (("finished_reason", "length"),)] == 1
    assert found["polysilicon:request_slo_met_total", ()] == 0
    assert found["polysilicon:memory_bytes", (("purpose", "weights"),)] == 1000


def test_choices_share_a_prompt_and_are_counted_apart(made, clock):
    tracker = tracking.Tracker([made], SLO())
    asked = request(prompt=12, n=3)
    tracker.submitted(asked)
    for choice in range(3):
        serve(tracker, clock, asked, ttft=0.1, gaps=[0.1], choice=choice)
    found = samples(made)
    assert found["polysilicon:prompt_tokens_total", ()] == 12
    assert found["polysilicon:generation_tokens_total", ()] == 6
    assert found["polysilicon:request_params_n_sum", ()] == 3
    assert found["polysilicon:request_success_total", (("finished_reason", "length"),)] == 3


@pytest.mark.parametrize(
    ("own", "ttft", "gap", "reason", "met"),
    [
        (None, 0.1, 0.01, FinishReason.STOP, True),
        (None, 0.3, 0.01, FinishReason.STOP, False),
        (None, 0.1, 0.03, FinishReason.LENGTH, False),
        (SLO(ttft=400.0), 0.3, 0.03, FinishReason.STOP, True),
        (None, 0.1, 0.01, FinishReason.ERROR, False),
        (None, 0.1, 0.01, FinishReason.CANCELLED, None),
    ],
)
def test_goodput_counts_what_ended_well_within_its_slo(made, clock, own, ttft, gap, reason, met):
    tracker = tracking.Tracker([made], SLO(ttft=200.0, tpot=20.0))
    asked = request(slo=own)
    tracker.submitted(asked)
    serve(tracker, clock, asked, ttft=ttft, gaps=[gap, gap], reason=reason)
    found = samples(made)
    assert found["polysilicon:request_slo_met_total", ()] == (met is True)
    assert found["polysilicon:request_slo_missed_total", ()] == (met is False)


def test_what_nobody_listens_to_any_more_counts_as_aborted(made, clock):
    tracker = tracking.Tracker([made], SLO())
    tracker.submitted(request(n=2))
    tracker.news(RequestOutput(request_id="a", choice=1, finish_reason=FinishReason.STOP))
    tracker.abandoned("a")
    tracker.abandoned("a")
    tracker.news(RequestOutput(request_id="a", choice=0, ids=(1,)))
    found = samples(made)
    assert found["polysilicon:request_success_total", (("finished_reason", "abort"),)] == 1
    assert found["polysilicon:request_success_total", (("finished_reason", "stop"),)] == 1
    assert found["polysilicon:generation_tokens_total", ()] == 0
    assert not list(tracker.running)


def stats(**fields):
    usage = GroupUsage(name="full", total=10, free=4, cached=1, in_use=5, limbo=0)
    return EngineStats(**{"kv": (usage,)} | fields)


def test_counts_of_an_engine_go_on_after_a_restart(made):
    made.engine(stats(running=3, waiting={"capacity": 2}, prefix_queries=50, prefix_hits=20), 0)
    made.engine(stats(prefix_queries=70, prefix_hits=20, preemptions=1, step_seconds=(0.1,)), 0)
    found = samples(made)
    assert found["polysilicon:num_requests_waiting_by_reason", (("reason", "capacity"),)] == 0
    assert found["polysilicon:kv_cache_usage_perc", ()] == pytest.approx(0.5)
    made.engine(stats(prefix_queries=5, preemptions=2, running=1), 1)
    found = samples(made)
    assert found["polysilicon:prefix_cache_queries_total", ()] == 75
    assert found["polysilicon:prefix_cache_hits_total", ()] == 20
    assert found["polysilicon:num_preemptions_total", ()] == 3
    assert found["polysilicon:num_requests_running", ()] == 1
    assert found["polysilicon:engine_restarts", ()] == 1
    assert found["polysilicon:step_time_seconds_count", ()] == 1


def test_every_metric_of_the_grafana_dashboard_exists(made):
    text = resources.files("polysilicon.server").joinpath("grafana.json").read_text()
    board = json.loads(text)
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for text in expressions for name in re.findall(r"polysilicon:\w+", text)}
    made.engine(stats(waiting={"capacity": 1}), 0)
    existing = {name for name, _ in samples(made)}
    existing.add("polysilicon:request_success_total")
    assert len(used) > 15
    assert used <= existing
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_history_has_rates_and_percentiles_of_the_last_seconds(clock):
    made = history.History()
    tracker = tracking.Tracker([made], SLO(ttft=1000.0))
    for name, ttft in (("a", 0.2), ("b", 0.4)):
        asked = request(name, prompt=10)
        tracker.submitted(asked)
        serve(tracker, clock, asked, ttft=ttft, gaps=[0.1] * 4)
    made.engine(stats(prefix_queries=10, running=2, step_seconds=(0.05, 0.07)))
    made.engine(stats(prefix_queries=30, prefix_hits=15))
    made.tick()
    point = made.points[-1]
    assert point["ttft_p50"] == pytest.approx(300)
    assert point["tpot_p99"] == pytest.approx(100)
    assert point["output_tokens"] == pytest.approx(1.0)
    assert point["prompt_tokens"] == pytest.approx(2.0)
    assert point["requests"] == point["goodput"] == pytest.approx(0.2)
    assert point["prefix_hit_rate"] == pytest.approx(0.75)
    assert point["step_ms"] == pytest.approx(60)
    clock.now += 60
    made.tick()
    assert made.points[-1]["ttft_p50"] is None
    assert made.points[-1]["output_tokens"] == 0
    for _ in range(history.SECONDS + 5):
        made.tick()
    assert len(made.points) == history.SECONDS


def test_the_dashboard_lists_what_runs(clock):
    made = history.History()
    tracker = tracking.Tracker([made], SLO())
    for index in range(dashboard.MOST_REQUESTS + 3):
        tracker.submitted(request(f"r{index}"))
    clock.now += 2
    tracker.news(RequestOutput(request_id="r0", choice=0, ids=(1, 2), num_cached_tokens=4))
    made.engine(stats(waiting={"grammar": 1}))
    made.tick()
    state = dashboard.state(
        history=made,
        tracker=tracker,
        facts=FACTS,
        model_name="tiny",
        health=Health(state="ready"),
        restarts=2,
        since=0.0,
    )
    json.dumps(state)
    assert state["num_requests"] == dashboard.MOST_REQUESTS + 3
    assert len(state["requests"]) == dashboard.MOST_REQUESTS
    first = state["requests"][0]
    assert first["ttft_ms"] == pytest.approx(2000)
    assert (first["output_tokens"], first["cached_tokens"]) == (2, 4)
    assert state["kv"][0]["in_use"] == 5
    assert len(state["points"]) == 1


def test_the_page_loads_nothing_from_elsewhere():
    text = dashboard.page().decode()
    addresses = re.findall(r"https?://[^\s\"')]+", text)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}
    assert "<script src" not in text
    assert "@import" not in text


def test_a_line_is_logged_for_every_choice_and_holds_no_text(clock, caplog):
    caplog.set_level(logging.INFO, logger="polysilicon.requests")
    tracker = tracking.Tracker([request_log.RequestLog()], SLO())
    asked = request()
    tracker.submitted(asked)
    serve(tracker, clock, asked, ttft=0.5, gaps=[0.25])
    (record,) = caplog.records
    line = json.loads(record.getMessage())
    assert line["ttft_ms"] == 500
    assert line["e2e_ms"] == 750
    assert line["output_tokens"] == 2
    assert "error" not in line


def test_traces_have_a_span_a_choice_with_its_phases(clock):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracker = tracking.Tracker([Traces(provider.get_tracer("test"), "tiny")], SLO())
    asked = request()
    tracker.submitted(asked)
    times = RequestTimes(arrival=100.0, first_scheduled=100.25, first_token=100.5, finished=100.75)
    serve(tracker, clock, asked, ttft=0.5, gaps=[0.25], times=times)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    root = spans["llm_request"]
    assert root.end_time - root.start_time == pytest.approx(0.75e9, abs=1e3)
    assert root.attributes["gen_ai.usage.output_tokens"] == 2
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == root.context.span_id
        assert spans[name].end_time - spans[name].start_time == pytest.approx(0.25e9, abs=1e3)


def test_a_server_logs_its_requests(server):
    before = len(server.lines)
    body = {"prompt": "Tell nobody", "max_tokens": 3, "n": 2, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 200
    deadline = time.monotonic() + 20
    while len(records := [line for line in server.lines[before:] if line[0] == "{"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for line in records:
        record = json.loads(line)
        assert (record["finish_reason"], record["output_tokens"]) == ("length", 3)
        assert 0 < record["ttft_ms"] <= record["e2e_ms"]
        assert "nobody" not in line
