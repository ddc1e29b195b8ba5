"""The HTTP API as an OpenAPI document, generated from the models that check requests."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pagewire.gateway.api import chat, completions

PATH = "/openapi.json"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "400": "A field of the request is not valid.",
    "401": "The API key is missing or not valid.",
    "404": "The model does not exist.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "429": "Too many requests; `retry-after` says when to try again.",
    "503": "No scheduler can take the request now; `retry-after` says when to try again.",
}


def document() -> dict[str, Any]:
    """The document, in OpenAPI 3.1."""
    generating: dict[str, type[BaseModel]] = {
        chat.PATH: chat.ChatRequest,
        completions.PATH: completions.CompletionRequest,
    }
    _, schemas = models_json_schema(
        [(model, "validation") for model in generating.values()],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {
        path: {"post": _operation(model.__name__, model)} for path, model in generating.items()
    }
    paths["/v1/models"] = {"get": _operation("ListModels")}
    paths["/v1/models/{model}"] = {"get": _operation("GetModel")}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"]["parameters"] = [name]
    error = {"$ref": "#/components/schemas/Error"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagewire", "version": "1"},
        "paths": paths,
        "components": {
            "responses": {
                status: {"description": why, "content": {"application/json": {"schema": error}}}
                for status, why in _REFUSALS.items()
            },
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(name: str, body: type[BaseModel] | None = None) -> dict[str, Any]:
    answers = {"application/json": {"schema": {"type": "object"}}}
    operation: dict[str, Any] = {"operationId": name}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    refusals = _REFUSALS if body is not None else ("401", "404", "503")
    operation["responses"] = {
        "200": {"description": "The answer.", "content": answers},
        **{status: {"$ref": f"#/components/responses/{status}"} for status in refusals},
    }
    return operation
