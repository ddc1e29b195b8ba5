"""The OpenAPI document: FastAPI writes it, and this module adds what FastAPI cannot see.

FastAPI does not have the models of bodies, because the gateway parses bodies itself, with bounds.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

PATH = "/openapi.json"
_REF = "#/components/schemas/{model}"

Responses = dict[int | str, dict[str, Any]]


class ErrorDetail(BaseModel):
    """What is wrong: the field in `param`, and in `message` its value and the remedy."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


_UNAUTHORIZED: Responses = {401: {"description": "The API key is missing or not valid."}}
_REFUSALS: Responses = {
    400: {"description": "A field of the request is not valid."},
    **_UNAUTHORIZED,
    404: {"description": "The model does not exist."},
    408: {"description": "The body took too long to arrive."},
    413: {"description": "The body is too large."},
    429: {"description": "Too many requests; `retry-after` says when to try again."},
    503: {
        "description": "No scheduler can take the request; `retry-after` says when to try again."
    },
}
# FastAPI would add its own error for a wrong parameter to a route without another error.
_OTHERS: Responses = {"default": {"description": "Any other error."}}


def responses(has_body: bool, streams: bool) -> Responses:
    """The answers of a route. A stream has one event a line."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    errors = {**(_REFUSALS if has_body else _UNAUTHORIZED), **_OTHERS}
    return {
        200: {"description": "The answer.", "content": content},
        **{status: {**error, "model": ErrorBody} for status, error in errors.items()},
    }


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's description for a body that `model` checks."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def complete(document: dict[str, Any], bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's document with the models of the bodies and the API key."""
    _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas.get("$defs", {}))
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    return document
