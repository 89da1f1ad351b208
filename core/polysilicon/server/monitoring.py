"""`/metrics` and `/dashboard`: what the server measures of itself, and who is told of it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from polysilicon.engine.stats import EngineStats
from polysilicon.server import dashboard, json_text
from polysilicon.server.history import History
from polysilicon.server.metrics import Metrics
from polysilicon.server.request_log import RequestLog
from polysilicon.server.service import Service
from polysilicon.server.traces import Traces, make_tracer
from polysilicon.server.tracking import Sink, Tracker


class Monitoring:
    """Watches the dispatcher of a service. Made in a running event loop."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self._service = service
        self.metrics = Metrics(service.model_name)
        self.metrics.describe(service.dispatcher.facts, settings.kv_dtype)
        self.history = History()
        sinks: list[Sink] = [self.metrics, self.history, RequestLog()]
        if settings.otlp_endpoint is not None:
            sinks.append(Traces(make_tracer(settings.otlp_endpoint), service.model_name))
        self.tracker = Tracker(sinks, settings.slo)
        service.dispatcher.watch(self.tracker)
        service.dispatcher.observe(self._engine)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def _engine(self, stats: EngineStats) -> None:
        self.metrics.engine(stats, self._service.dispatcher.restarts)
        self.history.engine(stats)

    async def _tick(self) -> None:
        while True:
            self.history.tick()
            await asyncio.sleep(1)


def monitoring_router(service: Service) -> APIRouter:
    """The endpoints' routes."""
    monitoring = Monitoring(service)
    router = APIRouter(tags=["operations"])

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(monitoring.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/dashboard", include_in_schema=False)
    async def page() -> Response:
        return Response(dashboard.page(), media_type="text/html")

    @router.get("/dashboard/state", include_in_schema=False)
    async def state(since: Annotated[float, Query(allow_inf_nan=False)] = 0.0) -> Response:
        dispatcher = service.dispatcher
        health = dispatcher.health()
        return json_text.response(
            dashboard.state(
                history=monitoring.history,
                tracker=monitoring.tracker,
                facts=dispatcher.facts,
                model_name=service.model_name,
                health=health,
                restarts=dispatcher.restarts,
                since=since,
            )
        )

    return router
