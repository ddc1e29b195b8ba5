"""The OpenAPI document: FastAPI's description of all routes, with the models that check bodies."""

from typing import Any

import httpx
from schemathesis import openapi

from pagewire.gateway.api.chat import ChatRequest
from pagewire.gateway.api.tokenization import TokenizeRequest
from pagewire.gateway.http.app import Gateway, create_app
from pagewire.gateway.http.openapi import PATH
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.routing.schedulers import Schedulers


async def get(path: str, describe: bool = True) -> httpx.Response:
    metrics = GatewayMetrics()
    gateway = Gateway(Schedulers([], metrics), metrics, 1000, 10, describe=describe)
    transport = httpx.ASGITransport(create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.get(path)


async def document() -> dict[str, Any]:
    found: dict[str, Any] = (await get(PATH)).json()
    return found


async def test_it_can_be_turned_off() -> None:
    for path in (PATH, "/docs", "/docs/swagger-ui.css"):
        assert (await get(path, describe=False)).status_code == 404
        assert (await get(path)).status_code == 200


async def test_it_is_a_valid_document_of_every_route() -> None:
    schema = openapi.from_dict(await document())
    schema.validate()
    found = {(result.ok().method, result.ok().path) for result in schema.get_all_operations()}
    assert found == {
        ("post", "/v1/embeddings"),
        ("post", "/v1/score"),
        ("post", "/score"),
        ("post", "/v1/rerank"),
        ("post", "/rerank"),
        ("post", "/v2/rerank"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/v1/responses"),
        ("post", "/v1/messages"),
        ("post", "/v1/messages/count_tokens"),
        ("post", "/tokenize"),
        ("post", "/detokenize"),
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
        ("get", "/health"),
        ("get", "/ping"),
        ("post", "/ping"),
        ("get", "/healthz"),
        ("get", "/readyz"),
        ("get", "/load"),
        ("get", "/version"),
        ("get", "/metrics"),
    }


async def test_it_has_every_field_of_the_models() -> None:
    schemas = (await document())["components"]["schemas"]
    for model in (ChatRequest, TokenizeRequest):
        assert set(schemas[model.__name__]["properties"]) == set(model.model_fields)
    assert schemas["ChatRequest"]["required"] == ["messages"]


async def test_a_body_names_its_model_and_errors_have_theirs() -> None:
    chat = (await document())["paths"]["/v1/chat/completions"]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    error = chat["responses"]["429"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/ErrorBody"}


async def test_the_page_fetches_nothing_from_elsewhere() -> None:
    page = (await get("/docs")).text
    assert "http" not in page
    for asset in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert f"docs/{asset}" in page
