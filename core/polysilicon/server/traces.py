"""OpenTelemetry traces of requests: one span a choice, with its phases as children.

Attribute names are those of the OpenTelemetry semantic conventions for generative AI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.errors import ConfigError
from polysilicon.server.tracking import Record

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def make_tracer(endpoint: str) -> Tracer:
    """A tracer that sends to an OTLP collector (HTTP). Raises ConfigError where the packages are
    not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs OpenTelemetry ({error.name} is missing): "
            "pip install 'polysilicon[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "polysilicon"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer("polysilicon")


class Traces:
    """A sink that makes the spans of a choice when it has ended."""

    def __init__(self, tracer: Tracer, model_name: str) -> None:
        self._tracer = tracer
        self._model = model_name

    def tokens(self, record: Record, count: int, gap: float | None) -> None:
        """Spans are made at the end."""

    def ended(self, record: Record) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        assert record.finish_reason is not None
        assert record.finished is not None
        span = self._tracer.start_span(
            "llm_request",
            start_time=_nanoseconds(record, record.arrival),
            attributes={
                "gen_ai.request.id": record.request.id,
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [record.finish_reason.value],
                "gen_ai.usage.input_tokens": len(record.request.prompt),
                "gen_ai.usage.output_tokens": record.output_tokens,
                "gen_ai.usage.cached_tokens": record.cached_tokens,
            },
        )
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        times = record.times
        if times is not None:
            context = set_span_in_context(span)
            for name, begin, end in (
                ("queue", times.arrival, times.first_scheduled),
                ("prefill", times.first_scheduled, times.first_token),
                ("decode", times.first_token, times.finished),
            ):
                if begin is not None and end is not None:
                    self._tracer.start_span(
                        name, context=context, start_time=_nanoseconds(record, begin)
                    ).end(_nanoseconds(record, end))
        span.end(_nanoseconds(record, record.finished))


def _nanoseconds(record: Record, moment: float) -> int:
    """A moment of time.monotonic() on the clock of time.time(), in nanoseconds."""
    return int((record.started + moment - record.arrival) * 1e9)
