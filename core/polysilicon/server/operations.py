"""`/health`, `/ready` and `/version`: what operators and load balancers ask."""

from __future__ import annotations

import importlib.metadata

from fastapi import APIRouter
from starlette.responses import Response

from polysilicon.engine.health import Health
from polysilicon.server import json_text
from polysilicon.server.service import Service


def operations_router(service: Service) -> APIRouter:
    """The endpoints' routes."""
    router = APIRouter(tags=["operations"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """200 while the engine does its work, else 503 with the reason."""
        state = service.dispatcher.health()
        return _answer(state, state.healthy)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """200 while new requests are taken, else 503 with the reason."""
        state = service.dispatcher.health()
        return _answer(state, state.ready)

    @router.get("/version")
    async def version() -> Response:
        """The version of polysilicon."""
        return json_text.response({"version": _version()})

    return router


def _answer(state: Health, good: bool) -> Response:
    value = {"status": state.state, "reason": state.reason}
    return json_text.response(value, 200 if good else 503)


def _version() -> str:
    try:
        return importlib.metadata.version("polysilicon")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
