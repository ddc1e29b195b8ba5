"""How the gateway reads bodies."""

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from pagewire.gateway.errors import ApiError
from pagewire.gateway.http import body as gateway_body


async def test_a_body_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_body, "_BODY_SECONDS", 0.05)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "headers": headers, "method": "POST"}, receive)
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(gateway_body.read_body(request, 200_000), 5)
    assert (caught.value.status, caught.value.code) == (408, "request_timeout")
