"""GET /v1/models, /health and /version: what is served, and whether it answers."""

import asyncio
import time

from fastapi import APIRouter
from pydantic import BaseModel

import perilune
from perilune.serve.api.engine_requests import served
from perilune.serve.api.errors import ApiError
from perilune.serve.api.responses import Model, ModelList
from perilune.serve.client.protocol import EngineClient
from perilune.serve.generation import EngineInfo

_PATIENCE = 30.0
"""Seconds until an engine that does not answer counts as unhealthy: it answers between two steps, and a step may be long."""


class Health(BaseModel):
    status: str


class Version(BaseModel):
    version: str


def models_router(client: EngineClient) -> APIRouter:
    """What is served. `created` is when this router was made."""
    router = APIRouter()
    created = int(time.time())

    def entry(info: EngineInfo) -> Model:
        return Model(
            id=info.name,
            object="model",
            created=created,
            owned_by="perilune",
            max_model_len=info.max_length,
            weight_version=info.weight_version,
        )

    @router.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(object="list", data=[entry(await client.info())])

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Model:
        return entry(await served(client, model))

    @router.get("/health")
    async def health() -> Health:
        """200 if the engine answers."""
        try:
            await asyncio.wait_for(client.info(), _PATIENCE)
        except Exception as error:
            raise ApiError(503, f"the engine does not answer ({error or type(error).__name__})", code="engine_unavailable") from error
        return Health(status="ok")

    @router.get("/version")
    async def version() -> Version:
        return Version(version=perilune.__version__)

    return router
