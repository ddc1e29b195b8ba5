"""Requests as they arrive: a small one is decoded, a large one only in its small fields.

Decoding, rendering and tokenizing some kilobytes takes a few milliseconds at worst. The event loop
does that for short texts, and a thread for texts from a kilobyte on. A helper process reads larger
requests, and those that a chat template expands.
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from pagewire.auth.costs import estimate_prompt, kept_tokens, text_tokens
from pagewire.errors import RequestError, invalid
from pagewire.scheduler.text.tool_input import json_values
from pagewire.v1 import inference_pb2 as pb

# Measured with 8 KiB: 4 ms for a text of combining characters, 2 ms for one of a single word.
INLINE_TEXT_BYTES = 8 << 10
# A template may add a hundred bytes of text to a message of two bytes: 128 messages take 3 ms.
INLINE_MESSAGES = 128
INLINE_TEMPLATE_BYTES = 1 << 10
# A template may indent JSON of 32 levels: a value of two bytes becomes 130 bytes of text. The worst
# tools of 239 values took 20 ms on an idle core.
INLINE_TOOL_VALUES = 128
# A thread costs the loop as much as 400 bytes of text.
THREAD_TEXT_BYTES = 1 << 10
# An id takes 30 ns.
INLINE_IDS_BYTES = 64 << 10
# The most bytes of all fields but the input, the tokens to resume from and the prediction.
MAX_OTHER_BYTES = 128 << 10
MAX_FIELDS = 1024

_FIELDS = pb.GenerateRequest.DESCRIPTOR.fields_by_name
_TEXTS = {_FIELDS[name].number for name in ("prompt", "chat", "pair")}
_IDS = {_FIELDS[name].number for name in ("prompt_token_ids", "resume_token_ids")}
_BYTES_AN_ID = 2  # a varint of two or three bytes holds ids from 128 to 2 million
_RESUMED = _FIELDS["resume_token_ids"].number
_PREDICTION = _FIELDS["prediction"].number


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request as it arrives, decoded as a whole or in part.

    `data` is None if `message` is the whole request. Otherwise it is the serialized request, and
    `message` lacks the input, the tokens to resume from and the prediction. `prompt_tokens` is an
    estimate.
    """

    message: pb.GenerateRequest
    resumes: bool
    prompt_tokens: int
    data: bytes | None = None

    @classmethod
    def of(cls, message: pb.GenerateRequest) -> "IncomingRequest":
        """A request that has been decoded as a whole."""
        return cls(message, bool(message.resume_token_ids), estimate_prompt(message))


def takes_a_thread(message: pb.GenerateRequest) -> bool:
    """Whether a request has so much text that the event loop should not tokenize it."""
    kind: str | None = message.WhichOneof("input")
    if kind in (None, "prompt_token_ids"):
        return False
    size = len(message.prompt) if kind == "prompt" else getattr(message, kind).ByteSize()
    return bool(size >= THREAD_TEXT_BYTES)


def read_request(data: bytes) -> IncomingRequest:
    """Reads a serialized request.

    Raises DecodeError for bytes that are not a request, RequestError for too many or too large
    fields.
    """
    if len(data) <= INLINE_TEXT_BYTES:
        message = pb.GenerateRequest.FromString(data)
        if not expands(message):
            return IncomingRequest.of(message)
    others: list[bytes] = []
    texts = ids = prediction = 0
    resumes = False
    for number, begin, end in _fields(data):
        if number in _TEXTS:
            texts += end - begin
        elif number in _IDS:
            ids += end - begin
            resumes |= number == _RESUMED
        elif number == _PREDICTION:
            prediction += end - begin
        else:
            others.append(data[begin:end])
    head = b"".join(others)
    if len(head) > MAX_OTHER_BYTES:
        raise invalid(
            "",
            f"the request has {len(head)} bytes besides its input; at most {MAX_OTHER_BYTES} are "
            "taken; shorten its other fields",
        )
    if texts + prediction <= INLINE_TEXT_BYTES and ids <= INLINE_IDS_BYTES:
        message = pb.GenerateRequest.FromString(data)
        if not expands(message):
            return IncomingRequest.of(message)
    message = pb.GenerateRequest.FromString(head)
    tokens = kept_tokens(message, text_tokens(texts) + ids // _BYTES_AN_ID)
    return IncomingRequest(message, resumes, tokens, data)


def expands(message: pb.GenerateRequest | pb.TokenizeRequest) -> bool:
    """Whether a chat template may make its text much larger than the message."""
    if message.WhichOneof("input") != "chat":
        return False
    chat = message.chat
    return (
        len(chat.messages) > INLINE_MESSAGES
        or chat.HasField("chat_template")  # it may run for any time
        or json_values(chat) > INLINE_TOOL_VALUES
        or chat.template_kwargs.ByteSize() > INLINE_TEMPLATE_BYTES
    )


def _fields(data: bytes) -> list[tuple[int, int, int]]:
    """Number, begin and end of each field of a message, tags included.

    See https://protobuf.dev/programming-guides/encoding.
    """
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(data):
        if len(found) == MAX_FIELDS:
            raise _too_many_fields()
        begin = at
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 1:
            at += 8
        elif kind == 2:
            size, at = _varint(data, at)
            at += size
        elif kind == 5:
            at += 4
        else:
            raise DecodeError(f"field {tag >> 3} has the unknown wire type {kind}")
        if at > len(data):
            raise DecodeError(f"field {tag >> 3} ends after the end of the message")
        found.append((tag >> 3, begin, at))
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a number does not end")


def _too_many_fields() -> RequestError:
    return invalid(
        "", f"the request has more than {MAX_FIELDS} fields; send lists of numbers packed"
    )
