"""Delivery by arrays yields the same text as feeding each stream separately."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.packing import unpack, unpack_unsigned
from pagewire.scheduler.core.batching.step_plan import StepOutcome
from pagewire.scheduler.requests.delivery import DeltaBuffer
from pagewire.scheduler.requests.open_request import Request
from pagewire.scheduler.requests.slot_streams import SlotStreams
from pagewire.scheduler.text.text_stream import TextStream
from pagewire.scheduler.text.tokenizer import Tokenizer

SLOTS = 4


def open_request(
    tokenizer: Tokenizer, stream: int, buffer: DeltaBuffer, stop: tuple[str, ...] = ()
) -> Request:
    request = Request(f"r{stream}", buffer, stream, 0.0, stream)
    request.text = TextStream(tokenizer.detokenizer(), stop, include_stop=False)
    request.unreported_prompt = 10 + stream
    return request


def outcome(tokens: list[int], index: int, stopped: tuple[int, ...] = ()) -> StepOutcome:
    rows = len(tokens)
    return StepOutcome(
        slots=np.arange(rows),
        tokens=np.array(tokens, np.int32),
        indices=np.full(rows, index, np.int32),
        stopped=[*stopped],
        ended=[],
        valid=None,
    )


def taken(buffer: DeltaBuffer) -> dict[int, list[tuple[int, int, str, int]]]:
    """By stream: (index, token, text, prompt tokens) of each entry."""
    message = buffer.take()
    tokens, at, found = unpack(message.token_ids).tolist(), 0, {}
    assert not message.token_counts, "each has one"
    arrays = (message.streams, message.indices, message.text_sizes)
    streams, indices, sizes = (unpack_unsigned(array).tolist() for array in arrays)
    prompts = message.prompt_tokens or [0] * len(streams)
    for row, stream in enumerate(streams):
        text = message.text[at : at + sizes[row]]
        at += sizes[row]
        entry = (indices[row], tokens[row], text.decode(), prompts[row])
        found.setdefault(stream, []).append(entry)
    assert at == len(message.text)
    return found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_texts_are_those_of_streams_fed_one_by_one(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Random tokens: parts of characters, special ones, ids outside the vocabulary."""
    ids = st.integers(0, tokenizer._backend.get_vocab_size() + 3)
    steps = data.draw(st.lists(st.lists(ids, min_size=SLOTS, max_size=SLOTS), max_size=12))
    buffers = [DeltaBuffer(), DeltaBuffer()]
    streams = SlotStreams(SLOTS, tokenizer.token_texts)
    stops = [(), (), ("a", "th"), ()]
    references = []
    for slot in range(SLOTS):
        buffer = buffers[slot % 2]
        streams.occupy(slot, open_request(tokenizer, 7 + slot, buffer, stops[slot]))
        references.append(TextStream(tokenizer.detokenizer(), stops[slot], include_stop=False))
    for index, tokens in enumerate(steps):
        assert len(streams.first_tokens(np.arange(SLOTS))) == SLOTS * (index == 0)
        ended = streams.deliver(outcome(tokens, index), {})
        got = {**taken(buffers[0]), **taken(buffers[1])}
        for slot, (reference, token) in enumerate(zip(references, tokens, strict=True)):
            prompt = 17 + slot if index == 0 else 0
            assert got[7 + slot] == [(index, token, reference.feed(token), prompt)]
            assert (slot in ended) == (reference.stop_string is not None)


def test_a_stop_token_ends_its_row_without_text(tokenizer: Tokenizer) -> None:
    buffer = DeltaBuffer()
    streams = SlotStreams(SLOTS, tokenizer.token_texts)
    word = int(tokenizer.encode("the", add_special_tokens=False)[-1])
    requests = [open_request(tokenizer, slot, buffer) for slot in range(3)]
    requests[1].include_stop_token = True
    requests[2].text = None
    for slot, request in enumerate(requests):
        streams.occupy(slot, request)
    assert streams.deliver(outcome([word] * 3, 0, stopped=(0, 1)), {}) == [0, 1]
    got = taken(buffer)
    assert [got[stream][0][2] == "" for stream in range(3)] == [True, False, True]


def test_a_slot_forgets_the_request_before(tokenizer: Tokenizer) -> None:
    first, second = DeltaBuffer(), DeltaBuffer()
    streams = SlotStreams(SLOTS, tokenizer.token_texts)
    streams.occupy(0, open_request(tokenizer, 1, first, stop=("zzz",)))
    streams.deliver(outcome([5], 0), {})
    streams.occupy(0, open_request(tokenizer, 2, second))
    streams.deliver(outcome([5], 0), {})
    assert list(taken(first)) == [1]
    assert [entry[3] for entry in taken(second)[2]] == [12]


def test_rows_go_to_the_requests_that_are_in_the_slots_now(
    tokenizer: Tokenizer,
) -> None:
    first, second = DeltaBuffer(), DeltaBuffer()
    streams = SlotStreams(SLOTS, tokenizer.token_texts)
    for slot in range(2):
        streams.occupy(slot, open_request(tokenizer, slot, first))
    step = outcome([5, 6], 0)
    streams.deliver(step, {})
    streams.deliver(replace(step, indices=step.indices + 1), {})
    assert {stream: len(news) for stream, news in taken(first).items()} == {0: 2, 1: 2}
    request = open_request(tokenizer, 7, second)
    request.text = None
    streams.occupy(1, request)
    streams.deliver(step, {})
    assert list(taken(first)) == [0]
    assert [entry[1:3] for entry in taken(second)[7]] == [(6, "")]


@pytest.mark.parametrize("how", ["ended", "moved"])
def test_a_slot_left_before_the_first_token_costs_later_steps_nothing(
    tokenizer: Tokenizer, how: str
) -> None:
    buffer = DeltaBuffer()
    streams = SlotStreams(SLOTS, tokenizer.token_texts)
    requests = [open_request(tokenizer, slot, buffer) for slot in range(2)]
    for slot, request in enumerate(requests):
        streams.occupy(slot, request)
    if how == "ended":
        requests[1].open = False
    else:
        streams.occupy(2, requests[1])
    slots = np.array([0] if how == "ended" else [0, 2])
    step = replace(outcome([5] * len(slots), 0), slots=slots)
    assert streams.first_tokens(slots) == requests[: len(slots)]
    streams.deliver(step, {})
    assert streams.first_tokens(slots) == []
    assert not streams._fresh
