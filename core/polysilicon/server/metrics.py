"""Prometheus metrics: the names and meanings of vLLM's, with the prefix `polysilicon:`, so that
dashboards carry over; step time, goodput and restarts are our own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.process_collector import ProcessCollector

from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.stats import EngineStats
from polysilicon.server.tracking import Record

PREFIX = "polysilicon:"

# A second series for every counter, which says when it began, is what nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1,
    2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_PHASE = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50,
    60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKENS = tuple(scale * 10**power for power in range(6) for scale in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20, 50, 128)


class Metrics:
    """A sink of request records and engine stats, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        ProcessCollector(registry=self.registry)

        self._running = self._gauge("num_requests_running", "Sequences that run.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait.")
        self._waiting_by = Gauge(
            f"{PREFIX}num_requests_waiting_by_reason",
            "Sequences that wait, by what for.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._kv_use = self._gauge(
            "kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1; cached ones are free."
        )
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._preemptions = self._counter("num_preemptions", "Sequences preempted.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that began.")
        self._generation = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            f"{PREFIX}request_success",
            "Sequences ended, by why.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", _FIRST_TOKEN
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between one token and the next.", _PER_TOKEN
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "A sequence's mean time for each token after the first.",
            _PER_TOKEN,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From submission to end.", _PHASE
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From submission to the first step.", _PHASE
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _PHASE
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the end.", _PHASE
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From the first step to the end.", _PHASE
        )
        self._prompt_sizes = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self._output_sizes = self._histogram(
            "request_generation_tokens", "Tokens generated for a sequence.", _TOKENS
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "The max_tokens that requests ask for.", _TOKENS
        )
        self._n = self._histogram("request_params_n", "The n that requests ask for.", _CHOICES)
        self._step = self._histogram("step_time_seconds", "Time of a step.", _PER_TOKEN)
        self._slo_met = self._counter(
            "request_slo_met", "Sequences that ended within their SLO; its rate is the goodput."
        )
        self._slo_missed = self._counter(
            "request_slo_missed", "Sequences that did not end within their SLO."
        )
        self._restarts = self._gauge("engine_restarts", "Times the engine was restarted.")
        self._last = EngineStats()
        self._last_restarts = 0

    def describe(self, facts: ModelFacts, kv_dtype: str | None) -> None:
        """State what does not change: sizes of the KV cache and the memory bill."""
        info = Info(f"{PREFIX}cache_config", "The KV cache.", registry=self.registry)
        info.info(
            {
                "block_size": str(facts.page_size),
                "num_gpu_blocks": str(facts.kv_pages),
                "cache_dtype": kv_dtype or "auto",
            }
        )
        memory = Gauge(
            f"{PREFIX}memory_bytes",
            "Device memory by purpose.",
            ("model_name", "purpose"),
            registry=self.registry,
        )
        for purpose, size in facts.memory.items():
            memory.labels(self._model, purpose).set(size)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def engine(self, stats: EngineStats, restarts: int) -> None:
        """Take in what the engine says of itself; its counts begin anew when it is restarted."""
        self._running.set(stats.running)
        self._waiting.set(stats.num_waiting)
        for reason in self._last.waiting.keys() | stats.waiting.keys():
            self._waiting_by.labels(self._model, reason).set(stats.waiting.get(reason, 0))
        self._kv_use.set(stats.kv_use)
        last = self._last if restarts == self._last_restarts else EngineStats()
        self._prefix_queries.inc(stats.prefix_queries - last.prefix_queries)
        self._prefix_hits.inc(stats.prefix_hits - last.prefix_hits)
        self._preemptions.inc(stats.preemptions - last.preemptions)
        for seconds in stats.step_seconds:
            self._step.observe(seconds)
        self._restarts.set(restarts)
        self._last, self._last_restarts = stats, restarts

    def tokens(self, record: Record, count: int, gap: float | None) -> None:
        self._generation.inc(count)
        if gap is not None:
            self._itl.observe(gap)
            return
        assert record.ttft is not None
        self._ttft.observe(record.ttft)
        if record.choice == 0:
            self._prompt.inc(len(record.request.prompt))

    def ended(self, record: Record) -> None:
        assert record.finish_reason is not None
        reason = _VLLM_REASONS.get(record.finish_reason.value, record.finish_reason.value)
        self._success.labels(self._model, reason).inc()
        for histogram, value in (
            (self._tpot, record.tpot),
            (self._e2e, record.latency),
            (self._queue, record.queued),
            (self._prefill, record.prefilled),
            (self._decode, record.decoded),
        ):
            if value is not None:
                histogram.observe(value)
        if record.prefilled is not None and record.decoded is not None:
            self._inference.observe(record.prefilled + record.decoded)
        self._output_sizes.observe(record.output_tokens)
        if record.choice == 0:
            params = record.request.params
            self._prompt_sizes.observe(len(record.request.prompt))
            self._n.observe(params.n)
            if params.max_tokens is not None:
                self._max_tokens.observe(params.max_tokens)
        if record.met_slo is not None:
            (self._slo_met if record.met_slo else self._slo_missed).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(PREFIX + name, text, ("model_name",), registry=self.registry)
        return gauge.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(PREFIX + name, text, ("model_name",), registry=self.registry)
        return counter.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, text, ("model_name",), registry=self.registry, buckets=buckets
        )
        return histogram.labels(self._model)


_VLLM_REASONS = {"cancelled": "abort"}
