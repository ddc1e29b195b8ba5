"""/v1/models: the served models as OpenAI, vLLM and Anthropic describe them."""

import uuid
from datetime import UTC, datetime
from typing import Any

from pagewire.v1 import inference_pb2 as pb

PATH = "/v1/models"
_NAMESPACE = uuid.UUID("6f1bcb0c-0f55-4a3f-9d5e-7a55a2b6d8a1")


def model_card(model: pb.Model) -> dict[str, Any]:
    """One model. `root` is the loaded model; `parent` is null, as no model is an adapter.

    Without a chat template, the model only continues text.
    """
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "pagewire",
        "root": model.root or model.id,
        "parent": None,
        "max_model_len": model.max_model_len,
        "has_chat_template": model.has_chat_template,
        "permission": [_permission(model)],
    }


def anthropic_card(model: pb.Model) -> dict[str, Any]:
    """One model as Anthropic describes it."""
    created = datetime.fromtimestamp(model.created, UTC)
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
    }


def model_list(models: list[pb.Model], anthropic: bool) -> dict[str, Any]:
    """All models; the list has one page."""
    if not anthropic:
        return {"object": "list", "data": [model_card(model) for model in models]}
    ids = [model.id for model in models]
    return {
        "data": [anthropic_card(model) for model in models],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": False,
    }


def _permission(model: pb.Model) -> dict[str, Any]:
    """Permissions for old OpenAI clients: generation is allowed, fine-tuning is not. The id depends
    on the model only, so that all gateways return the same answer."""
    return {
        "id": f"modelperm-{uuid.uuid5(_NAMESPACE, model.id).hex}",
        "object": "model_permission",
        "created": model.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
