"""A streaming client of the OpenAI-style API, for the commands that call a server."""

import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from pagewire.cli.errors import CommandError

DEFAULT_URL = "http://127.0.0.1:8000"
# A flag would show the key to every user of the machine.
KEY_VARIABLE = "PAGEWIRE_API_KEY"
UNAUTHORIZED = 401


def authorization() -> dict[str, str]:
    """The header with the API key in PAGEWIRE_API_KEY; no header without a key.

    CommandError for a key that no header can hold.
    """
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        return {}
    if not all("!" <= character <= "~" for character in key):
        raise CommandError(
            f"the API key in the environment variable {KEY_VARIABLE} has a character that is not "
            "visible ASCII, such as a blank or a line end; remove it"
        )
    return {"authorization": f"Bearer {key}"}


def server_url(given: str) -> str:
    """The URL of a server, without the `/v1` that clients of OpenAI's API need.

    CommandError for a text that is no URL.
    """
    from urllib.parse import urlsplit

    url = given if "://" in given else f"http://{given}"
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise CommandError(f"{given} is not the URL of a server: {error}") from error
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Answer:
    """One streamed answer. Iterate over it for its text; then read its figures.

    Times are in seconds since the request was sent. The server counts `tokens`.
    """

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self._url = server_url(url) + path
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self.text = ""
        self.ttft: float | None = None
        self.duration = 0.0
        self.tokens = 0
        self.prompt_tokens = 0
        self.finish_reason: str | None = None

    async def __aiter__(self) -> AsyncIterator[str]:
        started = time.perf_counter()
        async for event in _events(self._url, self._body):
            piece = self._take(event)
            if piece:
                self.duration = time.perf_counter() - started
                if self.ttft is None:
                    self.ttft = self.duration
                self.text += piece
                yield piece

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, over the time after the first; 0 for fewer than two tokens."""
        decoding = self.duration - (self.ttft or 0.0)
        return (self.tokens - 1) / decoding if self.tokens > 1 and decoding > 0 else 0.0

    def _take(self, event: dict[str, Any]) -> str:
        """The new text of an event. Keeps the event's usage and finish reason."""
        if "error" in event:
            raise CommandError(f"the answer failed: {_message(event)}")
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]
            self.prompt_tokens = event["usage"]["prompt_tokens"]
        if not event.get("choices"):
            return ""
        choice = event["choices"][0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        return text or ""


def chat_answer(url: str, model: str, messages: list[dict[str, str]], **options: Any) -> Answer:
    """The answer to a conversation. Options that are None are not sent."""
    body = {"model": model, "messages": messages, **_given(options)}
    return Answer(url, "/v1/chat/completions", body)


def text_answer(url: str, model: str, prompt: str, **options: Any) -> Answer:
    """The continuation of a text. Options that are None are not sent."""
    return Answer(url, "/v1/completions", {"model": model, "prompt": prompt, **_given(options)})


async def served_models(url: str) -> list[str] | None:
    """The names of the models that a server serves; None if no server answers at the URL."""
    cards = await model_cards(url)
    return None if cards is None else [str(card["id"]) for card in cards]


async def model_cards(url: str) -> list[dict[str, Any]] | None:
    """The server's descriptions of its models; None if no server answers."""
    import httpx

    url = server_url(url)

    try:
        async with httpx.AsyncClient(
            timeout=5.0, trust_env=False, headers=authorization()
        ) as client:
            response = await client.get(url + "/v1/models")
    except httpx.TransportError:
        return None
    except httpx.InvalidURL as error:
        raise CommandError(f"{url} is not the URL of a server: {error}") from error
    if response.status_code == UNAUTHORIZED:
        raise CommandError(f"{url}: {_key_problem()}")
    if response.status_code != 200:
        raise CommandError(
            f"{url} answers with HTTP status {response.status_code}: {response.text}"
        )
    try:
        return [{**card, "id": str(card["id"])} for card in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{url}/v1/models is not a list of models; check the URL") from error


async def first_model(url: str) -> str:
    """The first model that a server serves; CommandError if there is no server or no model."""
    return str((await listed_models(url))[0]["id"])


async def listed_models(url: str) -> list[dict[str, Any]]:
    """The models that a server serves; CommandError if there is no server or no model."""
    cards = await model_cards(url)
    if cards is None:
        raise CommandError(
            f"no server answers at {url}; start one with `pagewire run`, or give another address "
            "with --url"
        )
    if not cards:
        raise CommandError(f"the server at {url} serves no model yet; try again in a moment")
    return cards


async def _events(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The parsed server-sent events of a response."""
    import httpx

    # No timeout: a request may wait long in the server's queue.
    client = httpx.AsyncClient(timeout=None, trust_env=False, headers=authorization())
    try:
        async with client, client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise CommandError(_refusal(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))
    except httpx.TransportError as error:
        raise CommandError(f"the connection to {url} failed: {error!r}") from error
    except UnicodeEncodeError as error:  # Python keeps such bytes as unpaired surrogates
        raise CommandError("a text of the request is not UTF-8; convert it") from error


def _key_problem() -> str:
    """Why a server refuses the key, and which variable to set."""
    if os.environ.get(KEY_VARIABLE):
        return (
            f"the server does not know the API key in the environment variable {KEY_VARIABLE}; "
            "`pagewire keys new NAME --file FILE` makes one for the file of --api-keys-file"
        )
    return (
        "the server wants an API key; set the environment variable "
        f"{KEY_VARIABLE}, as in `export {KEY_VARIABLE}=KEY`"
    )


def _refusal(status: int, body: bytes) -> str:
    if status == UNAUTHORIZED:
        return _key_problem()
    try:
        return f"the server refused with HTTP status {status}: {_message(json.loads(body))}"
    except (ValueError, KeyError, TypeError):
        return (
            f"the server refused with HTTP status {status}: {body[:300].decode(errors='replace')}"
        )


def _message(event: dict[str, Any]) -> str:
    return str(event["error"]["message"])


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
