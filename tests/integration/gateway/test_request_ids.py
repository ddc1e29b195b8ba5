"""Ids of requests: set in the body or a header, returned, and sent to schedulers."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from pagewire.gateway.parsing.parser_pool import INLINE_BYTES
from support.scripted.in_process_gateway import in_process_gateway
from support.scripted.scripted_scheduler import ScriptedScheduler

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def peer() -> ScriptedScheduler:
    return ScriptedScheduler()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(peer: ScriptedScheduler) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process_gateway(peer) as client:
        yield client


async def post(
    client: httpx.AsyncClient, header: str | None = None, route: str = COMPLETION, **fields: Any
) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": 1, **fields}
    if route == CHAT:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **fields}
    headers = {} if header is None else {"X-Request-Id": header}
    return await client.post(route, json=body, headers=headers)


@pytest.mark.parametrize(
    ("header", "field", "answered"),
    [("trace-1", None, "trace-1"), (None, "mine", "mine"), ("trace-1", "mine", "mine")],
)
@pytest.mark.parametrize(("route", "kind"), [(CHAT, "chatcmpl"), (COMPLETION, "cmpl")])
async def test_a_given_id_is_answered_and_sent_on(
    client: httpx.AsyncClient,
    peer: ScriptedScheduler,
    header: str | None,
    field: str | None,
    answered: str,
    route: str,
    kind: str,
) -> None:
    peer.submitted.clear()
    # In the body of a large request a helper process finds it.
    for padding in ("", "u" * INLINE_BYTES):
        answer = await post(client, header, route, request_id=field, n=2, user=padding)
        assert answer.headers["x-request-id"] == answered
        assert answer.json()["id"] == f"{kind}-{answered}"
    sent = [request.request_id for request in peer.submitted]
    assert all(each.startswith(f"{kind}-{answered}.") for each in sent)
    assert len(set(sent)) == 4, "the same id may be used again"


@pytest.mark.parametrize("max_tokens", [1, 0], ids=["answered", "refused"])
async def test_anthropics_clients_find_the_id_by_their_name(
    client: httpx.AsyncClient, max_tokens: int
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens}
    answer = await client.post("/v1/messages", json=body, headers={"X-Request-Id": "trace-1"})
    assert answer.status_code == (200 if max_tokens else 400)
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "trace-1"


async def test_an_answer_without_a_given_id_has_one(client: httpx.AsyncClient) -> None:
    answers = [await post(client), await post(client, stream=True), await post(client, n=99)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3
    assert answers[0].json()["id"] == f"cmpl-{ids[0]}"
    assert f'"id":"cmpl-{ids[1]}"' in answers[1].text
    assert answers[2].status_code == 400


async def test_every_answer_repeats_the_header(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/healthz", "/nowhere"):
        answer = await client.get(path, headers={"x-request-id": "abc"})
        assert answer.headers["x-request-id"] == "abc"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "tab\t"])
async def test_an_id_that_is_not_valid_is_refused(client: httpx.AsyncClient, given: str) -> None:
    answer = await post(client, request_id=given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    if given.strip() == given:
        answer = await post(client, header=given)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Id")
        assert answer.headers["x-request-id"] != given


async def test_openais_client_finds_the_id(client: httpx.AsyncClient) -> None:
    openai_client = openai.AsyncOpenAI(
        base_url="http://gateway/v1", api_key="x", max_retries=0, http_client=client
    )
    answer = await openai_client.completions.create(
        model="scripted", prompt="hi", max_tokens=1, extra_headers={"X-Request-Id": "r-7"}
    )
    assert answer._request_id == "r-7"
