"""The HTTP application."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from polysilicon.errors import PolysiliconError
from polysilicon.server.anthropic import failures as anthropic_failures
from polysilicon.server.anthropic.messages import messages_router
from polysilicon.server.anthropic.schemas import CountTokensBody, MessagesBody
from polysilicon.server.bodies import SCHEMA_REFERENCE, Body
from polysilicon.server.connection import ClientGone
from polysilicon.server.dispatcher import Dispatcher
from polysilicon.server.errors import ApiError, api_error, of_details
from polysilicon.server.monitoring import monitoring_router
from polysilicon.server.openai.chat import chat_router
from polysilicon.server.openai.completions import completions_router
from polysilicon.server.openai.embeddings import embeddings_router
from polysilicon.server.openai.failures import failure_response
from polysilicon.server.openai.models import models_router
from polysilicon.server.openai.responses import responses_router
from polysilicon.server.openai.responses_schema import ResponsesBody
from polysilicon.server.openai.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from polysilicon.server.openai.tokens import tokens_router
from polysilicon.server.operations import operations_router
from polysilicon.server.protection import Protection
from polysilicon.server.service import Service
from polysilicon.server.settings import Settings

logger = logging.getLogger(__name__)

_BODIES: tuple[type[Body], ...] = (
    ChatBody,
    CompletionBody,
    CountTokensBody,
    DetokenizeBody,
    EmbeddingBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
)
_ROUTERS = (
    chat_router,
    completions_router,
    embeddings_router,
    messages_router,
    models_router,
    responses_router,
    tokens_router,
    operations_router,
    monitoring_router,
)


def create_app(dispatcher: Dispatcher, settings: Settings) -> FastAPI:
    """The application over a dispatcher that has been started."""
    service = Service(dispatcher, settings)
    # FastAPI's own documentation pages load scripts from other hosts, and redirects would go to
    # whatever host a request names.
    app = FastAPI(title="polysilicon", docs_url=None, redoc_url=None, redirect_slashes=False)
    for router in _ROUTERS:
        app.include_router(router(service))
    _answer_errors(app)
    app.add_middleware(
        Protection,
        api_keys=settings.api_keys,
        max_body=settings.max_body,
        body_seconds=settings.request_timeout,
        respond=_respond,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    app.state.service = service
    return app


def _respond(path: str, error: ApiError) -> Response:
    """An error in the form that the path's clients read."""
    if path.startswith("/v1/messages"):
        return anthropic_failures.failure_response(error)
    return failure_response(error)


def _answer_errors(app: FastAPI) -> None:
    """Answer every exception with an error object, and never with a traceback."""

    @app.exception_handler(PolysiliconError)
    async def _known(request: Request, error: PolysiliconError) -> Response:
        return _respond(request.url.path, api_error(error))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = {
            404: f"there is nothing at {path[:200]!r}: see /openapi.json",
            405: f"{request.method} is not what {path[:200]!r} takes: see /openapi.json",
        }.get(error.status_code, str(error.detail))
        return _respond(path, ApiError(error.status_code, message))

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> Response:
        return _respond(request.url.path, of_details(list(error.errors())))

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def _gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def _unknown(request: Request, error: Exception) -> Response:
        return _respond(request.url.path, ApiError(500, "the server failed: see its log"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the schemas of the bodies."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        _, definitions = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template=SCHEMA_REFERENCE
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= definitions.get("$defs", {})
        app.openapi_schema = document
    return app.openapi_schema
