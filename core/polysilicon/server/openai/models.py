"""`GET /v1/models` and `GET /v1/models/{name}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from polysilicon.server import json_text
from polysilicon.server.service import Service


def models_router(service: Service) -> APIRouter:
    """The endpoints' routes."""
    router = APIRouter(tags=["openai"])

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "polysilicon",
            "root": service.model_name,
            "parent": None,
            "max_model_len": service.max_length,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The names that requests may give as `model`."""
        data = [card(name) for name in service.settings.model_names]
        return json_text.response({"object": "list", "data": data})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        return json_text.response(card(service.model_named(name)))

    return router
