"""Arriving requests: their decoded parts, and refusals."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import RequestError
from pagewire.scheduler.requests.incoming_request import (
    INLINE_IDS_BYTES,
    INLINE_MESSAGES,
    INLINE_TEMPLATE_BYTES,
    INLINE_TEXT_BYTES,
    MAX_FIELDS,
    MAX_OTHER_BYTES,
    IncomingRequest,
    read_request,
)
from pagewire.v1 import inference_pb2 as pb


def small(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="an id",
        sampling=pb.SamplingParams(temperature=0.5, logit_bias={3: 1.0}),
        stop=pb.StopConditions(max_tokens=5, stop=["end"]),
        deadline_ms=1000,
        beam_search=pb.BeamSearch(width=3),
        **fields,
    )


TEXT = "x" * (INLINE_TEXT_BYTES + 1)
MANY_IDS = list(range(1000, 1000 + INLINE_IDS_BYTES))


@pytest.mark.parametrize(
    "large",
    [
        {"prompt": TEXT},
        {"chat": pb.ChatInput(messages=[pb.ChatMessage(role="user", content=TEXT)])},
        {"prompt_token_ids": pb.TokenIds(ids=MANY_IDS)},
        {"prompt": "x", "resume_token_ids": MANY_IDS},
        {"prompt": "x", "prediction": TEXT},
    ],
    ids=["text", "chat", "token ids", "resumed", "prediction"],
)
def test_only_the_small_fields_of_a_large_request_are_decoded(large: dict[str, object]) -> None:
    data = small(**large).SerializeToString()
    incoming = read_request(data)
    assert incoming.data == data
    assert incoming.resumes == ("resume_token_ids" in large)
    if "prompt" not in large or large["prompt"] == TEXT:
        assert incoming.message == small()
    if "prediction" in large:  # the text of a prediction is not part of the prompt
        assert incoming.message == small()
        assert incoming.prompt_tokens < 5
    # As a gateway sends it: the input after the rest.
    split = small().SerializeToString() + pb.GenerateRequest(**large).SerializeToString()
    assert read_request(split).message == incoming.message


@pytest.mark.parametrize("resumed", [[], MANY_IDS[:5000]], ids=["small", "with ids"])
def test_chats_that_a_template_expands_are_large(resumed: list[int]) -> None:
    """Each message may be empty: the template adds text to it."""

    def read(messages: int, variable: int = 0) -> IncomingRequest:
        chat = pb.ChatInput(messages=[pb.ChatMessage()] * messages)
        if variable:
            chat.template_kwargs["v"] = "x" * variable
        data = small(chat=chat, resume_token_ids=resumed).SerializeToString()
        incoming = read_request(data)
        assert incoming.data in (None, data)
        return incoming

    assert read(INLINE_MESSAGES, 100).data is None
    for large in (read(INLINE_MESSAGES + 1), read(1, INLINE_TEMPLATE_BYTES)):
        assert large.data is not None
        assert large.message == small()
        assert large.resumes == bool(resumed)


@given(
    prompt=st.text(max_size=3000),
    resumed=st.lists(st.integers(0, 2**32 - 1), max_size=3000),
    salt=st.text(max_size=300),
)
@settings(max_examples=100, deadline=None)
def test_a_request_that_is_small_enough_is_decoded_whole(
    prompt: str, resumed: list[int], salt: str
) -> None:
    message = small(prompt=prompt, resume_token_ids=resumed, cache_salt=salt)
    incoming = read_request(message.SerializeToString())
    if incoming.data is None:
        assert incoming.message == message
    else:
        assert incoming.message == small(cache_salt=salt)
    assert incoming.resumes == bool(resumed)


@given(data=st.binary(max_size=64), cut=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_large_requests_that_protobuf_refuses_are_refused(data: bytes, cut: int) -> None:
    """Own code reads the fields of a large message: it must not accept what protobuf refuses."""
    data = small(prompt=TEXT).SerializeToString() + data
    data = data[: len(data) - cut]
    try:
        pb.GenerateRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            _read(data)
        return
    try:
        _read(data)
    except DecodeError:
        # Groups, which proto3 does not have and protobuf skips.
        assert any(byte & 7 in (3, 4) for byte in data)


def _read(data: bytes) -> None:
    """Decodes like the scheduler and its helper process together."""
    incoming = read_request(data)
    if incoming.data is not None:
        pb.GenerateRequest.FromString(incoming.data)


def test_too_many_fields_are_refused() -> None:
    unpacked = b"\x40\x05" * (MAX_FIELDS + 1)  # resume_token_ids, one at a time
    with pytest.raises(RequestError, match="send lists of numbers packed"):
        read_request(small(prompt=TEXT).SerializeToString() + unpacked)


def test_large_fields_besides_the_input_are_refused() -> None:
    message = small(prompt="x", cache_salt="s" * (MAX_OTHER_BYTES + 1))
    with pytest.raises(RequestError, match="besides its input"):
        read_request(message.SerializeToString())
