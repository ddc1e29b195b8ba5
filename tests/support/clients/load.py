"""Clients of a fleet: their requests, their answers, and how long they waited."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pagewire.models import EMBEDDED_NAME

CONNECT_SECONDS = 60.0


@dataclass(frozen=True)
class Question:
    """One request; its client disconnects after `leaves_after` chunks, if set."""

    path: str
    body: dict[str, Any]
    leaves_after: int | None = None


@dataclass
class Choice:
    """One choice of an answer."""

    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """An answer. `pause` is the longest wait for a chunk; `error` says why it is incomplete."""

    choices: dict[int, Choice] = field(default_factory=dict)
    tokens: int = 0
    pause: float = 0.0
    error: str | None = None

    @property
    def texts(self) -> dict[int, str]:
        """The text of each choice."""
        return {index: self.choices[index].text for index in sorted(self.choices)}

    @property
    def finish_reasons(self) -> dict[int, str | None]:
        """The finish reason of each choice."""
        return {index: self.choices[index].finish_reason for index in sorted(self.choices)}

    @property
    def logprobs(self) -> list[Any]:
        """Token and log probability of all choices in order."""
        return [pair for index in sorted(self.choices) for pair in self.choices[index].logprobs]

    @property
    def content(self) -> tuple[Any, ...]:
        """The fields that must be the same after faults."""
        names = [name for name, _ in self.logprobs]
        return (self.texts, self.finish_reasons, self.tokens, names)

    def begins_like(self, other: "Answer") -> bool:
        """Whether the texts of both answers agree up to the end of the shorter one."""
        pairs = [(text, other.texts.get(index, "")) for index, text in self.texts.items()]
        return all(a.startswith(b) or b.startswith(a) for a, b in pairs)

    def far_from(self, other: "Answer", tolerance: float) -> bool:
        """Whether log probabilities of the same tokens differ by more than a tolerance."""
        values = zip(self.logprobs, other.logprobs, strict=True)
        return any(abs(mine - its) > tolerance for (_, mine), (_, its) in values)


def questions(count: int, seed: int = 0, vocab_size: int = 1000) -> list[Question]:
    """Streamed requests with prompts of token ids, greedy and sampled.

    Some have log probabilities, an echoed prompt, stop strings, two choices, or a shared prefix.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(256, vocab_size) for _ in range(48)]
    made = []
    for number in range(count):
        prompt = [rng.randrange(256, vocab_size) for _ in range(rng.randint(4, 90))]
        body: dict[str, Any] = {
            "model": EMBEDDED_NAME,
            "prompt": shared + prompt if number % 4 == 0 else prompt,
            "max_tokens": rng.randint(40, 160),
            "ignore_eos": True,
            "temperature": rng.choice([0, 0.8]),
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if number % 3 == 0:
            body["logprobs"] = 2
            body["echo"] = number % 2 == 1
        if number % 5 == 0:
            body["stop"] = ["qz", "the end of it"]
        if number % 7 == 0:
            body["min_tokens"] = 20
        if number % 11 == 0:
            body["n"] = 2
        made.append(Question("/v1/completions", body))
    return made


def mixed_questions(count: int, seed: int = 0) -> list[Question]:
    """Like `questions`, with unary requests, chats, and clients that disconnect before the end."""
    rng = random.Random(seed + 1)
    made = []
    for question in questions(count, seed):
        kind = rng.random()
        if kind < 0.2:
            body = {**question.body, "stream": False}
            del body["stream_options"]
            question = Question(question.path, body)
        elif kind < 0.35:
            question = Question(question.path, question.body, rng.randint(0, 20))
        elif kind < 0.5:
            question = _conversation(question.body, rng)
        made.append(question)
    return made


def _conversation(body: dict[str, Any], rng: random.Random) -> Question:
    """A chat request with the sampling parameters of a completion request."""
    left_out = ("prompt", "logprobs", "echo")
    chat = {name: value for name, value in body.items() if name not in left_out}
    words = " ".join(rng.choice(("red", "green", "blue", "seven")) for _ in range(20))
    chat["messages"] = [{"role": "user", "content": words}]
    return Question("/v1/chat/completions", chat)


class Load:
    """Sends `questions` from `clients` concurrent clients; `done` counts the answers.

    With `endless` it repeats them until `stop`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        questions: Sequence[Question],
        clients: int,
        endless: bool = False,
    ) -> None:
        self._urls = urls
        self._stopped = not endless
        self._questions = questions
        self._clients = clients
        self.done = 0
        self.refused = 0  # connections that were retried at another gateway
        self.answers: list[Answer] = []

    def stop(self) -> None:
        """Makes this round the last."""
        self._stopped = True

    async def run(self) -> list[Answer]:
        """Returns the answers in the order of the questions, round by round."""
        waiting = self._numbers()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=180)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def client() -> None:
                for number in waiting:
                    answer = Answer()
                    self.answers.append(answer)
                    await self._ask(session, number, answer)
                    self.done += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(self._clients):
                    group.create_task(client())
        return self.answers

    def _numbers(self) -> Iterator[int]:
        yield from range(len(self._questions))
        while not self._stopped:
            yield from range(len(self._questions))

    async def reached(self, count: int) -> None:
        """Waits until `count` questions have been answered."""
        while self.done < count:
            await asyncio.sleep(0.005)

    async def _ask(self, session: aiohttp.ClientSession, number: int, answer: Answer) -> None:
        question = self._questions[number]
        began = time.monotonic()
        attempt = number
        while True:
            url = self._urls[attempt % len(self._urls)] + question.path
            try:
                async with session.post(url, json=question.body) as response:
                    if await self._is_draining(response) and len(self._urls) > 1:
                        raise ConnectionRefusedError
                    await _read(response, question, answer)
                return
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, OSError):
                # A load balancer would send a request without an answer to another gateway.
                if answer.tokens or answer.choices or time.monotonic() - began > CONNECT_SECONDS:
                    answer.error = "the gateway was lost"
                    return
                self.refused += 1
                attempt += 1
                await asyncio.sleep(0.02)
            except Exception as error:
                answer.error = f"{type(error).__name__}: {error}"
                return

    async def _is_draining(self, response: aiohttp.ClientResponse) -> bool:
        return response.status == 503 and "shutting down" in await response.text()


async def _read(response: aiohttp.ClientResponse, question: Question, answer: Answer) -> None:
    if response.status != 200:
        answer.error = f"{response.status}: {await response.text()}"
    elif question.body["stream"]:
        await _read_stream(response, question, answer)
    else:
        _take(await response.json(), answer)


async def _read_stream(
    response: aiohttp.ClientResponse, question: Question, answer: Answer
) -> None:
    last = time.monotonic()
    chunks = 0
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        answer.pause = max(answer.pause, now - last)
        last = now
        if line.startswith(b"data: [DONE]"):
            return
        _take(json.loads(line[6:]), answer)
        if answer.error is not None:
            return
        chunks += 1
        if question.leaves_after is not None and chunks > question.leaves_after:
            return
    answer.error = "the stream broke off"


def _take(message: dict[str, Any], answer: Answer) -> None:
    if "error" in message:
        answer.error = json.dumps(message["error"])
        return
    for given in message["choices"]:
        choice = answer.choices.setdefault(given["index"], Choice())
        message_or_delta = given.get("delta") or given.get("message") or {}
        choice.text += given["text"] if "text" in given else message_or_delta.get("content") or ""
        if given.get("logprobs"):
            # The first token of an echoed prompt has no log probability.
            values = [value or 0.0 for value in given["logprobs"]["token_logprobs"]]
            choice.logprobs += zip(given["logprobs"]["tokens"], values, strict=True)
        choice.finish_reason = given["finish_reason"] or choice.finish_reason
    if message.get("usage"):
        answer.tokens = message["usage"]["completion_tokens"]


def differences(
    questions: Sequence[Question],
    got: Sequence[Answer],
    want: Sequence[Answer],
    tolerance: float = 0.0,
) -> list[str]:
    """How answers differ from those of the undisturbed run `want`, which has one round.

    If the client disconnects, only the beginnings are compared. `tolerance` is for log
    probabilities, whose last bits depend on the batch in a real model.
    """
    found = []
    for number, mine in enumerate(got):
        question, other = questions[number % len(want)], want[number % len(want)]
        if mine.error is not None:
            found.append(f"request {number} failed: {mine.error}")
        elif question.leaves_after is not None:
            if not mine.begins_like(other):
                found.append(f"request {number} began otherwise")
        elif mine.content != other.content:
            where = _first_difference(mine, other)
            found.append(f"request {number} differs {where}; it asked {question.body}")
        elif mine.far_from(other, tolerance):
            found.append(f"request {number} has other log probabilities")
    return found


def _first_difference(mine: Answer, other: Answer) -> str:
    names: list[tuple[str, Callable[[Answer], Any]]] = [
        ("in finish_reason", lambda a: a.finish_reasons),
        ("in tokens", lambda a: a.tokens),
        ("in text", lambda a: "|".join(a.texts.values())),
        ("in logprobs", lambda a: [name for name, _ in a.logprobs]),
    ]
    name, value = next((n, v) for n, v in names if v(mine) != v(other))
    a, b = value(mine), value(other)
    if isinstance(a, str | list) and isinstance(b, str | list):
        at = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        return f"{name} from {at}: {a[at : at + 8]!r} for {b[at : at + 8]!r}"
    return f"{name}: {a!r} for {b!r}"
