"""Requests that are costly to read, and the answers that they must get.

Each is as large as a limit allows, or larger.
"""

import json
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct, Value

from pagewire.config import GatewayConfig, SchedulerConfig
from pagewire.gateway.api.completions import MAX_OUTPUTS
from pagewire.limits import MAX_BIASES, MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS
from pagewire.rpc.protocol import MAX_CLIENT_MESSAGE_BYTES
from pagewire.v1 import inference_pb2 as pb

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SECONDS = 120.0
BODY_BYTES: int = GatewayConfig.max_body_bytes
CHARS: int = SchedulerConfig.max_prompt_chars
MESSAGES: int = GatewayConfig.max_messages
LARGE_BYTES = BODY_BYTES - 1024  # of a gRPC message; with an API key its limit is that of a body


@dataclass(frozen=True)
class Target:
    """The addresses of a fleet, and the key to use."""

    host: str
    port: int
    scheduler: str
    key: str | None


@dataclass(frozen=True)
class Outcome:
    """`status` is the HTTP status, or the one of the gRPC code; None if the client disconnected."""

    status: int | None
    message: str = ""
    param: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class CostlyRequest:
    """A request. The answer must have one of `statuses`; an error must match `names`.

    Requests with `work` need steps of the worker, so other requests wait in the queue.
    """

    name: str
    send: Callable[[Target], Outcome]
    statuses: tuple[int | None, ...]
    names: str = ""
    works: bool = False

    def fault(self, outcome: Outcome) -> str | None:
        """Why an outcome is wrong, or None."""
        if outcome.status not in self.statuses:
            return f"{outcome.status} instead of {self.statuses}: {outcome.message}"
        text = f"{outcome.param or ''} {outcome.message}"
        if outcome.status not in (200, None) and not re.search(self.names, text):
            return f"{outcome.status} does not name {self.names!r}: {text}"
        if len(outcome.message) > 1100:
            return f"a message of {len(outcome.message)} characters"
        return None


@dataclass(frozen=True)
class Body:
    """Sends one HTTP request."""

    path: str
    build: Callable[[], bytes]
    headers: dict[str, str] = field(default_factory=dict)
    chunk: int = 0  # bytes of a chunk of the transfer coding; 0 for none
    disconnects_after: float | None = None  # seconds after the last byte is sent
    reads_after: float = 0.0

    def __call__(self, target: Target) -> Outcome:
        """Sends the body and reads the whole answer."""
        body = self.build()
        given = {"host": "pagewire", "content-type": "application/json", **self.headers}
        if target.key is not None:
            given["authorization"] = f"Bearer {target.key}"
        if self.chunk:
            given["transfer-encoding"] = "chunked"
            body = _chunked(body, self.chunk)
        else:
            given["content-length"] = str(len(body))
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {given[name]}" for name in given)]
        head = "\r\n".join([*lines, "", ""]).encode()
        began = time.monotonic()
        with socket.create_connection((target.host, target.port), SECONDS) as connection:
            try:
                connection.sendall(head)
                connection.sendall(body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused early; the answer may have been sent
            if self.disconnects_after is not None:
                time.sleep(self.disconnects_after)
                return Outcome(None, seconds=time.monotonic() - began)
            time.sleep(self.reads_after)
            status, answer = _read_answer(connection)
        message, param = "", None
        if status != 200:
            error = json.loads(answer)["error"] if answer.startswith(b"{") else {}
            message, param = error.get("message", answer.decode()), error.get("param")
        elif not answer.endswith((b"}", b"data: [DONE]\n\n")) or b'"error"' in answer[-4096:]:
            message = f"the answer broke off: {answer[-200:]!r}"
            status = 0
        return Outcome(status, message, param, time.monotonic() - began)


@dataclass(frozen=True)
class Pipelined:
    """Sends many small requests at once on one connection."""

    count: int

    def __call__(self, target: Target) -> Outcome:
        """The outcome has status 200 if all answers do."""
        key = "" if target.key is None else f"authorization: Bearer {target.key}\r\n"
        one = f"GET /v1/models HTTP/1.1\r\nhost: pagewire\r\n{key}\r\n".encode()
        last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        began = time.monotonic()
        with socket.create_connection((target.host, target.port), SECONDS) as connection:
            connection.sendall(one * (self.count - 1) + last)
            answers = _read_all(connection).count(b"HTTP/1.1 200 ")
        status = 200 if answers == self.count else 0
        return Outcome(status, f"{answers} answers", seconds=time.monotonic() - began)


@dataclass(frozen=True)
class Call:
    """Calls a method of the scheduler's public gRPC port with a message given as bytes."""

    method: str
    build: Callable[[], bytes]

    def __call__(self, target: Target) -> Outcome:
        """Makes the call and reads all messages of the answer."""
        data = self.build()
        metadata = [] if target.key is None else [("authorization", f"Bearer {target.key}")]
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        began = time.monotonic()
        with grpc.insecure_channel(target.scheduler, options=options) as channel:
            path = f"/pagewire.v1.Inference/{self.method}"
            try:
                if self.method == "Generate":
                    for _ in channel.unary_stream(path)(data, SECONDS, metadata):
                        pass
                else:
                    channel.unary_unary(path)(data, SECONDS, metadata)
            except grpc.RpcError as error:
                status = _HTTP_STATUS.get(error.code(), 500)
                return Outcome(status, f"{error.code().name}: {error.details()}")
        return Outcome(200, seconds=time.monotonic() - began)


_HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


def _read_answer(connection: socket.socket) -> tuple[int, bytes]:
    reader = connection.makefile("rb", 1 << 20)
    status = int(reader.readline().split()[1])
    headers = {}
    while (line := reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        return status, reader.read(int(headers["content-length"]))
    pieces = []
    while size := int(reader.readline() or b"0", 16):
        pieces.append(reader.read(size))
        reader.readline()
    return status, b"".join(pieces)


def _read_all(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def _chunked(body: bytes, size: int) -> bytes:
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def filled(before: str, unit: str, after: str, size: int = BODY_BYTES) -> Callable[[], bytes]:
    """A text of at most `size` bytes that repeats `unit`."""

    def build() -> bytes:
        begin, middle, end = before.encode(), unit.encode(), after.encode()
        return begin + middle * ((size - len(begin) - len(end)) // len(middle)) + end

    return build


def repeated(before: str, unit: str, count: int, after: str) -> Callable[[], bytes]:
    """A text that repeats `unit` `count` times."""
    return lambda: before.encode() + unit.encode() * count + after.encode()


def dumped(**fields: Any) -> Callable[[], bytes]:
    """A JSON object."""
    return lambda: json.dumps(fields).encode()


def prompt_of(unit: str) -> Callable[[], bytes]:
    """A body whose prompt repeats a JSON string's `unit` up to the limit of characters."""
    chars = len(json.loads(f'"{unit}"'))
    room = (BODY_BYTES - 64) // len(unit.encode())
    return repeated('{"max_tokens":4,"prompt":"', unit, min(CHARS // chars, room), '"}')


def message_of(unit: str) -> Callable[[], bytes]:
    """A body with one message that repeats `unit` up to the limit of characters."""
    count = min(CHARS, BODY_BYTES - 128) // len(unit.encode())
    return repeated('{"messages":[{"role":"user","content":"', unit, count, '"}]}')


_TOOL = '{"type":"function","function":{"name":"f"}}'
_MESSAGES = '"messages":[{"role":"user","content":"a"}]'


def prediction_of(unit: str) -> Callable[[], bytes]:
    """A body whose prediction repeats `unit` up to the limit of characters."""
    count = min(CHARS, BODY_BYTES - 256) // len(unit.encode())
    before = f'{{{_MESSAGES},"max_tokens":4,"prediction":{{"type":"content","content":"'
    return repeated(before, unit, count, '"}}')


def kwargs_of(unit: str) -> Callable[[], bytes]:
    """A body whose chat_template_kwargs hold a list that repeats `unit`, comma included."""
    return filled(f'{{{_MESSAGES},"max_tokens":4,"chat_template_kwargs":{{"x":[', unit, "1]}}")


def keys_of(name: str, before: str, count: int, value: str) -> Callable[[], bytes]:
    """A body with an object of `count` keys that all have the same value."""
    return lambda: (
        f'{{{before},"max_tokens":4,"{name}":{{'
        + ",".join(f'"{number}":{value}' for number in range(count))
        + "}}"
    ).encode()


def grpc_messages(messages: Iterable[pb.ChatMessage]) -> bytes:
    """A Generate request with these messages."""
    return pb.GenerateRequest(chat=pb.ChatInput(messages=messages)).SerializeToString()


def grpc_tools(text: str) -> bytes:
    """A Generate request with this text as its tools."""
    messages = [pb.ChatMessage(role="user", content="a")]
    return pb.GenerateRequest(chat=pb.ChatInput(messages=messages, tools=text)).SerializeToString()


def grpc_kwargs(nodes: int) -> bytes:
    """A Generate request with a Struct of `nodes` numbers."""
    one = Value(number_value=1).SerializeToString()
    entry = bytes((0x0A, len(one))) + one  # of field 1 of a ListValue
    struct = Struct()
    struct.fields["x"].list_value.MergeFromString(entry * nodes)
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="a")], template_kwargs=struct)
    return pb.GenerateRequest(chat=chat).SerializeToString()


def _refused(path: str, build: Callable[[], bytes], names: str) -> dict[str, Any]:
    return {"send": Body(path, build), "statuses": (400,), "names": names}


def _accepted(path: str, build: Callable[[], bytes], **body: Any) -> dict[str, Any]:
    return {"send": Body(path, build, **body), "statuses": (200,)}


def _either(path: str, build: Callable[[], bytes], names: str) -> dict[str, Any]:
    return {"send": Body(path, build), "statuses": (200, 400), "names": names}


def _disconnected(path: str, build: Callable[[], bytes], seconds: float = 0.0) -> dict[str, Any]:
    return {"send": Body(path, build, disconnects_after=seconds), "statuses": (None,)}


def _call(method: str, build: Callable[[], bytes], names: str, *statuses: int) -> dict[str, Any]:
    return {"send": Call(method, build), "statuses": statuses or (400,), "names": names}


def costly_requests(full_size: bool) -> list[CostlyRequest]:
    """All requests. At full size the longest answers and texts take a minute."""
    answer_tokens = 1000 if full_size else 120
    chars = CHARS if full_size else CHARS // 16
    prompt, kwargs = '"prompt":"a"', "chat_template_kwargs"
    made: dict[str, dict[str, Any]] = {
        # Text up to the limit of characters or bytes.
        "one word": _refused(COMPLETIONS, prompt_of("a"), "prompt.*tokens"),
        "ab ab ab": _refused(COMPLETIONS, prompt_of("ab "), "prompt.*tokens"),
        "emoji": _refused(COMPLETIONS, prompt_of("\U0001f600"), "prompt.*tokens"),
        "combining characters": _refused(
            COMPLETIONS, prompt_of("a\u0301\u0302\u0327"), "prompt.*tokens"
        ),
        "newlines": _refused(COMPLETIONS, prompt_of("\\n"), "prompt.*tokens"),
        "spaces": _refused(COMPLETIONS, prompt_of(" "), "prompt.*tokens"),
        "digits": _refused(COMPLETIONS, prompt_of("1"), "prompt.*tokens"),
        "escaped zeros": _refused(COMPLETIONS, prompt_of("\\u0000"), "prompt.*tokens"),
        "special tokens": _refused(COMPLETIONS, prompt_of("<|im_start|>"), "prompt.*tokens"),
        "half characters": _refused(COMPLETIONS, filled('{"prompt":"', "\\ud800", '"}'), "JSON"),
        "too many characters": _refused(
            COMPLETIONS, filled('{"prompt":"', "b", '"}'), "prompt.*(characters|tokens)"
        ),
        "a message of one word": _refused(CHAT, message_of("a"), "prompt|messages"),
        "a message of Chinese": _refused(CHAT, message_of("\u6c34"), "prompt|messages"),
        # chat_template_kwargs.
        "kwargs of small lists": _refused(CHAT, kwargs_of("[1],"), f"{kwargs}|JSON values"),
        "kwargs nested 16 deep": _refused(
            CHAT, kwargs_of("[" * 13 + "]" * 13 + ","), f"{kwargs}|JSON values"
        ),
        "kwargs of numbers": _refused(CHAT, kwargs_of("0.1e5,"), f"{kwargs}|JSON values"),
        "kwargs of strings": _refused(CHAT, kwargs_of('"ab",'), f"{kwargs}|JSON values"),
        "kwargs of objects": _refused(CHAT, kwargs_of('{"a":{}},'), f"{kwargs}|JSON values"),
        "kwargs of one string": _refused(
            CHAT, filled(f'{{{_MESSAGES},"{kwargs}":{{"x":"', "a", '"}}'), kwargs
        ),
        "kwargs with a long key": _refused(
            CHAT, filled(f'{{{_MESSAGES},"{kwargs}":{{"', "k", '":1}}'), kwargs
        ),
        "kwargs with 100k keys": _refused(
            CHAT, keys_of(kwargs, _MESSAGES, 100_000, "1"), f"{kwargs}|JSON values"
        ),
        "kwargs up to their limit": _either(CHAT, keys_of(kwargs, _MESSAGES, 4000, "1"), kwargs),
        # Tools and their calls.
        "tools of one description": _refused(
            CHAT,
            filled(
                f'{{{_MESSAGES},"tools":[{{"type":"function","function":{{"name":"f","description":"',
                "a",
                '"}}]}',
            ),
            "tools",
        ),
        "100k tools": _refused(
            CHAT,
            repeated(f'{{{_MESSAGES},"tools":[', f"{_TOOL},", 100_000, f"{_TOOL}]}}"),
            "tools|JSON values",
        ),
        "a schema of small lists": _refused(
            CHAT,
            filled(
                f'{{{_MESSAGES},"tools":[{{"type":"function","function":{{"name":"f","parameters":'
                '{"x":[',
                "[1],",
                "1]}}}]}",
            ),
            "tools|JSON values",
        ),
        "calls with arguments of brackets": _refused(
            CHAT,
            filled(
                '{"messages":[{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f",'
                '"arguments":"',
                "[",
                '"}}]}]}',
            ),
            "arguments",
        ),
        # Conversations.
        "4,096 messages": _either(
            CHAT,
            repeated(
                '{"messages":[', '{"role":"user","content":"a"},', MESSAGES - 1, _last_message()
            ),
            "prompt|messages",
        ),
        "200k messages": _refused(
            CHAT,
            repeated('{"messages":[', '{"role":"user","content":""},', 200_000, _last_message()),
            "messages|JSON values",
        ),
        "content parts": _refused(
            CHAT,
            filled(
                '{"messages":[{"role":"user","content":[',
                '{"type":"text","text":"a"},',
                '{"type":"text","text":"a"}]}]}',
            ),
            "prompt|messages|JSON values",
        ),
        # Predictions.
        "a prediction of one word": _refused(CHAT, prediction_of("a"), "prediction.*tokens"),
        "a prediction of emoji": _refused(CHAT, prediction_of("\U0001f600"), "prediction.*tokens"),
        "a prediction of parts": _refused(
            CHAT,
            filled(
                f'{{{_MESSAGES},"prediction":{{"type":"content","content":[',
                '{"type":"text","text":"a"},',
                '{"type":"text","text":"a"}]}}',
            ),
            "prediction|JSON values",
        ),
        # Token ids.
        "5M token ids": _refused(
            COMPLETIONS, repeated('{"prompt":[', "1,", 5_000_000, "1]}"), "prompt|JSON values"
        ),
        "ids at the limit of values": _refused(
            COMPLETIONS, repeated('{"prompt":[', "12345,", 1_990_000, "1]}"), "prompt"
        ),
        "ids beyond the vocabulary": _refused(
            COMPLETIONS, repeated('{"prompt":[', "2147483647,", 1000, "1]}"), "prompt"
        ),
        "ids that are none": _refused(
            COMPLETIONS, repeated('{"prompt":[', "1,", 1_500_000, '"a"]}'), "prompt"
        ),
        # Batches.
        "1,024 prompts": {
            **_either(
                COMPLETIONS,
                dumped(prompt=["a b c"] * MAX_OUTPUTS, max_tokens=1),
                "",
            ),
            "works": True,
        },
        "1,024 long prompts": {
            **_accepted(COMPLETIONS, dumped(prompt=[[7] * 1900] * MAX_OUTPUTS, max_tokens=1)),
            "works": True,
        },
        "log probabilities of long prompts": {
            **_accepted(
                COMPLETIONS,
                dumped(prompt=[[7] * 1900] * 3, n=4, echo=True, logprobs=20, max_tokens=1),
            ),
            "works": True,
        },
        "too many log probabilities of prompts": {
            **_refused(
                COMPLETIONS,
                dumped(prompt=[[7] * 1900] * 64, n=4, prompt_logprobs=20, max_tokens=1),
                "max_prompt_logprobs",
            ),
            "works": True,
        },
        "64 prompts with n": {
            **_accepted(COMPLETIONS, dumped(prompt=["a"] * 64, n=16, max_tokens=2)),
            "works": True,
        },
        "1,024 prompts with n": _refused(
            COMPLETIONS, dumped(prompt=["a"] * MAX_OUTPUTS, n=4), "outputs"
        ),
        "100k prompts": _refused(
            COMPLETIONS, repeated('{"prompt":[', '"a",', 100_000, '"a"]}'), "prompt"
        ),
        "1,024 prompts, client disconnects": {
            **_disconnected(
                COMPLETIONS, dumped(prompt=["a b c"] * MAX_OUTPUTS, max_tokens=500), 0.2
            ),
            "works": True,
        },
        # Other fields.
        "logit_bias of 300": {
            **_accepted(COMPLETIONS, keys_of("logit_bias", prompt, MAX_BIASES, "-1.5")),
            "works": True,
        },
        "logit_bias of 100k": _refused(
            COMPLETIONS, keys_of("logit_bias", prompt, 100_000, "0.1"), "logit_bias"
        ),
        "stop strings at their limit": {
            **_accepted(
                COMPLETIONS,
                dumped(
                    prompt="a",
                    stop=["ab" * (MAX_STOP_STRING_LENGTH // 2)] * MAX_STOP_STRINGS,
                    max_tokens=64,
                ),
            ),
            "works": True,
        },
        "1M stop strings": _refused(
            COMPLETIONS, repeated(f'{{{prompt},"stop":[', '"ab",', 1_000_000, '"a"]}'), "stop"
        ),
        "a stop string of 16 MB": _refused(
            COMPLETIONS, filled(f'{{{prompt},"stop":"', "a", '"}'), "stop"
        ),
        "1M stop tokens": _refused(
            COMPLETIONS,
            repeated(f'{{{prompt},"stop_token_ids":[', "12,", 1_000_000, "1]}"),
            "stop_token_ids",
        ),
        "metadata of 100k keys": _either(
            COMPLETIONS, keys_of("metadata", prompt, 100_000, '"a"'), "metadata"
        ),
        "a salt of 16 MB": _refused(
            COMPLETIONS, filled(f'{{{prompt},"cache_salt":"', "a", '"}'), "cache_salt"
        ),
        "a user of 16 MB": _either(COMPLETIONS, filled(f'{{{prompt},"user":"', "a", '"}'), "user"),
        "a model of 16 MB": {
            "send": Body(COMPLETIONS, filled(f'{{{prompt},"model":"', "a", '"}')),
            "statuses": (400, 404),
            "names": "model",
        },
        "an unknown field of 16 MB": _refused(
            COMPLETIONS, filled(f'{{{prompt},"wrong":[', "[],", "1]}"), "wrong|JSON values"
        ),
        "many unknown fields": _refused(
            COMPLETIONS,
            lambda: ("{" + ",".join(f'"w{n}":1' for n in range(300_000)) + "}").encode(),
            "w0|prompt",
        ),
        # JSON itself.
        "200 levels": _refused(
            COMPLETIONS,
            repeated('{"prompt":', "[" * 200 + "]" * 200, 1, "}"),
            "prompt|JSON",
        ),
        "100k levels": _refused(
            COMPLETIONS, repeated('{"prompt":', "[", 100_000, "]" * 100_000 + "}"), "prompt|JSON"
        ),
        "16 MB of brackets": _refused(COMPLETIONS, filled("", "[", ""), "JSON"),
        "wrong at its very end": _refused(
            COMPLETIONS, filled('{"max_tokens":4,"prompt":"', "a", '"'), "JSON"
        ),
        "wrong at the end of its values": _refused(
            CHAT, filled(f'{{{_MESSAGES},"{kwargs}":{{"x":[', '"a",', "1]"), "JSON"
        ),
        "a number of a million digits": _refused(
            COMPLETIONS,
            repeated(f'{{{prompt},"max_tokens":', "1", 1_000_000, "}"),
            "max_tokens|JSON",
        ),
        "a seed of 16 MB": _refused(
            COMPLETIONS, filled(f'{{{prompt},"seed":', "7", "}"), "seed|JSON"
        ),
        "a float of 16 MB": _either(
            COMPLETIONS, filled(f'{{{prompt},"temperature":0.', "1", "}"), "temperature|JSON"
        ),
        "duplicate keys": _either(
            COMPLETIONS, filled("{", '"user":"a",', f"{prompt}}}"), "JSON values|user"
        ),
        "white space": _refused(COMPLETIONS, filled("", " ", ""), "JSON"),
        "white space before a request": _accepted(
            COMPLETIONS, filled("", "\n", f'{{{prompt},"max_tokens":4}}')
        ),
        "an error in its first field": _refused(
            COMPLETIONS, filled('{"temperature":"hot","prompt":"', "a", '"}'), "temperature"
        ),
        "not UTF-8": _refused(
            COMPLETIONS,
            lambda: b'{"prompt":"' + b"\xff" * (BODY_BYTES - 16) + b'"}',
            "JSON|UTF-8",
        ),
        # HTTP.
        "more than the largest body": {
            "send": Body(COMPLETIONS, filled("", " ", "", BODY_BYTES + (1 << 20))),
            "statuses": (413,),
            "names": "body",
        },
        "chunks of one byte": _accepted(
            COMPLETIONS, filled("", " ", f'{{{prompt},"max_tokens":4}}', 1 << 20), chunk=1
        ),
        "1,000 pipelined requests": {"send": Pipelined(1000), "statuses": (200,)},
        "kwargs, client disconnects": _disconnected(CHAT, kwargs_of("[1],"), 0.02),
        "one word, client disconnects": _disconnected(COMPLETIONS, prompt_of("a"), 0.05),
        "one word, 1 ms to go": {
            "send": Body(
                COMPLETIONS,
                repeated('{"deadline_ms":1,"max_tokens":4,"prompt":"', "a", CHARS, '"}'),
            ),
            "statuses": (400, 504),
            "names": "deadline|prompt",
        },
        # Large answers.
        "log probabilities": {
            **_accepted(CHAT, lambda: _logprobs_body(answer_tokens, stream=False)),
            "works": True,
        },
        "log probabilities, read late": {
            **_accepted(CHAT, lambda: _logprobs_body(answer_tokens, stream=True), reads_after=2.0),
            "works": True,
        },
        "a beam search": {
            **_accepted(
                COMPLETIONS,
                dumped(
                    prompt="a", use_beam_search=True, best_of=16, n=16, max_tokens=40, temperature=0
                ),
            ),
            "works": True,
        },
        # The scheduler's gRPC port.
        "gRPC: one word": _call(
            "Generate",
            lambda: pb.GenerateRequest(prompt="a" * CHARS).SerializeToString(),
            "tokens",
        ),
        "gRPC: a prediction of one word": _call(
            "Generate",
            lambda: pb.GenerateRequest(
                prompt="a", prediction="a" * LARGE_BYTES
            ).SerializeToString(),
            "prediction",
        ),
        "gRPC: 5M token ids": _call(
            "Generate",
            lambda: pb.GenerateRequest(
                prompt_token_ids=pb.TokenIds(ids=[300] * 5_000_000)
            ).SerializeToString(),
            "prompt",
        ),
        "gRPC: tools of brackets": _call(
            "Generate", lambda: grpc_tools("[" * LARGE_BYTES), "tools"
        ),
        "gRPC: tools of 400k values": _call(
            "Generate", lambda: grpc_tools("[" + "{}," * 400_000 + "{}]"), "tools"
        ),
        "gRPC: 200k messages": _call(
            "Generate",
            lambda: grpc_messages([pb.ChatMessage(role="user", content="a")] * 200_000),
            "messages",
        ),
        "gRPC: kwargs of numbers": _call("Generate", lambda: grpc_kwargs(1_000_000), kwargs),
        "gRPC: logit_bias of 100k": _call(
            "Generate",
            lambda: pb.GenerateRequest(
                prompt="a",
                sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(100000), 1.0)),
            ).SerializeToString(),
            "logit_bias|besides its input",
        ),
        "gRPC: a million stop strings": _call(
            "Generate",
            lambda: pb.GenerateRequest(
                prompt="a", stop=pb.StopConditions(stop=["ab"] * 1_000_000)
            ).SerializeToString(),
            "stop|besides its input",
        ),
        "gRPC: 5M tokens to resume": _call(
            "Generate",
            lambda: pb.GenerateRequest(
                prompt="a", resume_token_ids=[300] * 5_000_000
            ).SerializeToString(),
            "resume",
        ),
        "gRPC: an id of 16 MB": _call(
            "Generate",
            lambda: pb.GenerateRequest(
                prompt="a", request_id="i" * LARGE_BYTES
            ).SerializeToString(),
            "request_id|besides its input",
        ),
        "gRPC: a million small fields": _call(
            "Generate", lambda: b"\x48\x01" * 1_000_000, "fields|input"
        ),
        "gRPC: no message": _call("Generate", lambda: b"\xff" * LARGE_BYTES, ""),
        "gRPC: more than the largest message": _call(
            "Generate",
            lambda: pb.GenerateRequest(prompt="a" * MAX_CLIENT_MESSAGE_BYTES).SerializeToString(),
            "larger|bytes",
            400,
            429,
        ),
        "gRPC: Tokenize one word": _call(
            "Tokenize", lambda: pb.TokenizeRequest(text="a" * chars).SerializeToString(), "", 200
        ),
        "gRPC: Tokenize emoji": _call(
            "Tokenize",
            lambda: pb.TokenizeRequest(text="\U0001f600" * (chars - 64)).SerializeToString(),
            "took longer",
            200,
            500,
        ),
        "gRPC: Detokenize 1M ids": _call(
            "Detokenize",
            lambda: pb.DetokenizeRequest(token_ids=[300] * 1_000_000).SerializeToString(),
            "token_ids",
            200,
            400,
        ),
        "gRPC: Abort an id of 16 MB": _call(
            "Abort",
            lambda: pb.AbortRequest(request_id="i" * LARGE_BYTES).SerializeToString(),
            "request_id",
            200,
            400,
        ),
    }
    return [CostlyRequest(name, **fields) for name, fields in made.items()]


def _last_message() -> str:
    return '{"role":"user","content":"a"}],"max_tokens":4}'


def _logprobs_body(tokens: int, stream: bool) -> bytes:
    """A body with the largest number of choices and of log probabilities."""
    return json.dumps(
        {
            "messages": [{"role": "user", "content": "a"}],
            "n": 16,
            "logprobs": True,
            "top_logprobs": 20,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
