"""`POST /v1/embeddings`: pooled hidden states of the last layer."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from starlette.responses import Response

from polysilicon.request import Request as EngineRequest
from polysilicon.request import SamplingParams
from polysilicon.server import json_text
from polysilicon.server.bodies import openapi_body, read_body
from polysilicon.server.connection import connected
from polysilicon.server.errors import ApiError, invalid
from polysilicon.server.openai.prompt_lists import prompt_list
from polysilicon.server.openai.schemas import EmbeddingBody
from polysilicon.server.service import Service, Usage, new_id
from polysilicon.server.turns import check_output

Float32 = npt.NDArray[np.float32]

_AT_ONCE = 64
"""Inputs of one body that are in the engine together."""


def embeddings_router(service: Service) -> APIRouter:
    """The endpoint's route."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/embeddings", openapi_extra=openapi_body(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        """Embed one or more texts."""
        body = await read_body(request, EmbeddingBody)
        async with connected(request.receive, service.settings.request_timeout):
            return json_text.response(await _embeddings(service, body))

    return router


async def _embeddings(service: Service, body: EmbeddingBody) -> dict[str, Any]:
    model = service.model_named(body.model)
    if body.dimensions is not None:
        raise invalid("dimensions is not supported: the model gives all of its own", "dimensions")
    prompts = await prompt_list(
        service, body.input, "input", body.add_special_tokens, body.truncate_prompt_tokens
    )
    params = SamplingParams(max_tokens=0)
    for prompt in prompts:
        service.check_length(prompt.ids, params)
    pooling: Literal["mean", "last"] = body.pooling or "mean"
    requests = [
        EngineRequest(
            id=new_id("embedding"),
            prompt=prompt.ids,
            params=params,
            priority=body.priority or 0,
            embed=pooling,
        )
        for prompt in prompts
    ]
    usage = Usage(sum(len(prompt.ids) for prompt in prompts))
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(request: EngineRequest) -> Float32:
        async with turns:
            return await _embedding(service, request, usage)

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        vectors = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    if body.normalize:
        vectors = [_normalised(vector) for vector in vectors]
    as_text = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, as_text)}
        for index, vector in enumerate(vectors)
    ]
    counted = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": counted}


async def _embedding(service: Service, request: EngineRequest, usage: Usage) -> Float32:
    with service.dispatcher.submit(request) as stream:
        async for outputs in stream:
            for output in outputs:
                check_output(output)
                usage.cached_tokens += output.num_cached_tokens
                if output.embedding:
                    return _finite(np.array(output.embedding, np.float32))
    raise ApiError(500, "the engine gave no embedding")


def _finite(vector: Float32) -> Float32:
    """The vector. Raises ApiError (500) for one that JSON could not say and nobody could use."""
    if not np.isfinite(vector).all():
        raise ApiError(
            500,
            "the model's hidden states of this input are NaN or infinite: its weights are damaged, "
            "or need another backend or --kv-dtype",
        )
    return vector


def _normalised(vector: Float32) -> Float32:
    """Of length 1; zeros stay zeros."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if length else vector


def _written(vector: Float32, as_text: bool) -> str | list[float]:
    """A list of numbers, or base64 of little-endian float32."""
    if as_text:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values
