"""The OpenAPI document: off by default, and generated from the models that check requests."""

import json

import httpx
from schemathesis import openapi

from pagewire.gateway.api.chat import ChatRequest
from pagewire.gateway.api.openapi import PATH, document
from pagewire.gateway.http.app import Gateway, create_app
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers


async def get(describe: bool) -> httpx.Response:
    metrics = GatewayMetrics()
    gateway = Gateway(Schedulers([], metrics), metrics, 1000, 10, describe=describe)
    transport = httpx.ASGITransport(create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.get(PATH)


async def test_it_is_served_only_if_enabled() -> None:
    assert (await get(False)).status_code == 404
    assert (await get(True)).json() == json.loads(json.dumps(document()))


def test_it_is_a_valid_document_of_every_route() -> None:
    schema = openapi.from_dict(document())
    schema.validate()
    found = {(result.ok().method, result.ok().path) for result in schema.get_all_operations()}
    assert found == {
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
    }


def test_it_has_every_field_of_the_models() -> None:
    schema = document()["components"]["schemas"]["ChatRequest"]
    assert set(schema["properties"]) == set(ChatRequest.model_fields)
    assert schema["required"] == ["messages"]
