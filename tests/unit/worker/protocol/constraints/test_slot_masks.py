"""Masks of a stream: they follow the tokens of its steps, and a slow or bad grammar fails alone."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import numpy as np
import pytest
from llguidance import LLMatcher

from pagewire.config import WorkerConfig
from pagewire.models import eos_token_ids, resolve_model
from pagewire.worker.protocol.constraints import slot_masks
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import compile_grammar, grammars_of
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory, last_stamp, stamp
from pagewire.worker.protocol.constraints.mask_processes import MaskProcesses
from pagewire.worker.protocol.constraints.mask_server import MaskServer, Start
from pagewire.worker.protocol.constraints.masked_sequence import MaskedSequence
from pagewire.worker.protocol.constraints.slot_masks import MAX_WAIT, SlotMasks, StepMasks
from support.children import children_of, running

FOLDER = resolve_model("embedded")
EOS = eos_token_ids(FOLDER)
NONE = np.empty(0, np.int32)
STRINGS = LLMatcher.grammar_from_json_schema(
    {"type": "array", "items": {"type": "string", "maxLength": 7}, "minItems": 99},
    overrides={"whitespace_pattern": " ?", "lenient": False, "coerce_one_of": False},
)
DIGITS = Constraint(LLMatcher.grammar_from_regex("[0-9]{3}"), "", EOS)
GRAMMARS = grammars_of(FOLDER, 4096)


@pytest.fixture(scope="module")
def processes() -> Iterator[MaskProcesses]:
    """Two real ones."""
    errors: list[BaseException] = []
    started = MaskProcesses(MaskMemory(8, GRAMMARS.words), 2, errors.append)
    started.launch(WorkerConfig(model="embedded"), FOLDER, None, 4096)
    assert started.ready()
    yield started
    started.close()
    assert not errors


@pytest.fixture
def masks(processes: MaskProcesses, monkeypatch: pytest.MonkeyPatch) -> SlotMasks:
    # A busy machine compiles late; two tests check that case.
    monkeypatch.setattr(slot_masks, "MAX_WAIT", 20)
    return SlotMasks(processes)


def step(masks: SlotMasks, slots: list[int], indices: list[int]) -> StepMasks:
    rows = np.arange(len(slots), dtype=np.int32) * 2  # every second row is constrained
    return masks.of_step(rows, np.array(slots, np.int32), np.array(indices))


def allowed(step: StepMasks) -> list[list[int]]:
    """The allowed tokens in each row of a step, once the masks are complete."""
    step.wait()
    return [tokens_of(mask) for mask in step.words[step.slots]]


def tokens_of(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def test_a_sequence_is_sent_when_its_step_is_launched(
    masks: SlotMasks, processes: MaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    start = processes.start

    def noted(starts: list[Start]) -> None:
        sent.extend(each.slot for each in starts)
        start(starts)

    monkeypatch.setattr(processes, "start", noted)
    masks.start(5, DIGITS, NONE, NONE)
    masks.start(2, DIGITS, NONE, NONE)
    assert sent == []
    masks.send()
    assert sent == [5, 2]
    masks.start(1, DIGITS, NONE, NONE)
    assert all(allowed(step(masks, [5, 2, 1], [0, 0, 0])))  # a wait sends, too
    assert sent == [5, 2, 1]


def test_masks_follow_the_tokens_of_each_row(masks: SlotMasks) -> None:
    (four, five) = (GRAMMARS.tokenizer.tokenize_str(digit)[0] for digit in "45")
    masks.start(3, DIGITS, NONE, NONE)
    masks.start(7, DIGITS, NONE, np.array([four, five], np.int32))
    first = step(masks, [3, 7], [0, 2])
    assert first.rows.tolist() == [0, 2]
    assert {four, five} < set(allowed(first)[0])
    first.advance(np.array([four, -9, five], np.int32))
    third, end = allowed(step(masks, [3, 7], [1, 3]))
    assert four in third
    assert end == sorted(EOS)
    assert not first.failures


def test_resumed_outputs_go_on_with_and_without_a_grammar(masks: SlotMasks) -> None:
    (four,) = GRAMMARS.tokenizer.tokenize_str("4")
    masks.start(0, DIGITS, NONE, NONE)
    assert all(allowed(step(masks, [0], [0])))  # the grammar is compiled
    masks.start(0, DIGITS, NONE, np.array([four] * 2, np.int32))
    masks.start(2, Constraint(allowed_token_ids=np.array([5, four])), NONE, np.array([four]))
    digits, few = allowed(step(masks, [0, 2], [2, 1]))
    assert four in digits
    assert few == sorted([5, four])


def test_a_token_that_is_not_allowed_fails_its_own_row(masks: SlotMasks) -> None:
    four, letter = (GRAMMARS.tokenizer.tokenize_str(each)[0] for each in "4x")
    for slot in range(3):
        masks.start(slot, DIGITS, NONE, NONE)
    first = step(masks, [0, 1, 2], [0, 0, 0])
    first.wait()
    first.advance(np.array([four, -9, letter, -9, four], np.int32))
    second = step(masks, [0, 1, 2], [1, 1, 1])
    assert [len(tokens) < 4096 for tokens in allowed(second)] == [True, False, True]
    (failure,) = second.failures
    assert failure.row == 2
    assert f"does not allow token {letter} at index 0" in failure.message


def test_masks_of_strings_are_those_of_one_matcher(masks: SlotMasks) -> None:
    draw, slots = random.Random(0), [0, 1, 2]
    matchers = [compile_grammar(GRAMMARS.tokenizer, STRINGS) for _ in slots]
    for slot in slots:
        masks.start(slot, Constraint(STRINGS, "", EOS), NONE, NONE)
    expected = np.empty_like(masks.memory.masks[0])
    for index in range(60):
        now = step(masks, slots, [index] * 3)
        now.wait()
        assert not now.failures
        tokens = np.full(5, -9, np.int32)
        for slot, matcher in zip(slots, matchers, strict=True):
            matcher.unsafe_compute_mask_ptr(expected.ctypes.data, expected.nbytes)
            np.testing.assert_array_equal(now.words[slot], expected)
            tokens[2 * slot] = draw.choice(tokens_of(expected))
            assert matcher.consume_token(int(tokens[2 * slot]))
        now.advance(tokens)


def test_steps_sent_ahead_wait_for_the_tokens_before(
    masks: SlotMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (four,) = GRAMMARS.tokenizer.tokenize_str("4")
    masks.start(0, DIGITS, NONE, NONE)
    first, ahead = step(masks, [0], [0]), step(masks, [0], [1])
    first.wait()
    monkeypatch.setattr(slot_masks, "MAX_WAIT", MAX_WAIT)
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(ahead.wait()))
    waiting.start()
    time.sleep(2 * MAX_WAIT)  # a long step is not a slow grammar
    assert not seen
    first.advance(np.array([four], np.int32))
    waiting.join()
    assert not ahead.failures
    assert len(seen) == 1


def test_an_ended_or_failed_sequence_holds_up_no_step(masks: SlotMasks) -> None:
    for slot, token in ((0, EOS[0]), (1, -1)):
        masks.start(slot, DIGITS, NONE, NONE)
        if token >= 0:
            output = np.array(GRAMMARS.tokenizer.tokenize_str("456"), np.int32)
            masks.start(slot, DIGITS, NONE, output)
        index = 3 if token >= 0 and len(output) == 3 else 0
        now = step(masks, [slot], [index])
        now.wait()
        now.advance(np.array([token], np.int32))
        later = step(masks, [slot], [index + 9])
        assert len(allowed(later)[0]) == 4096
        assert not later.failures


def test_a_step_that_failed_is_not_waited_for(masks: SlotMasks) -> None:
    masks.start(0, DIGITS, NONE, NONE)
    failed, later = step(masks, [0], [0]), step(masks, [0], [1])
    failed.wait()
    failed.abandon()
    later.wait()
    assert not later.failures


def test_a_bad_grammar_fails_its_own_row(masks: SlotMasks) -> None:
    masks.start(0, Constraint(LLMatcher.grammar_from_regex("(?=a)"), "", EOS), NONE, NONE)
    masks.start(1, DIGITS, NONE, NONE)
    both = step(masks, [0, 1], [0, 0])
    free, digits = allowed(both)
    assert [(failure.row, failure.retryable) for failure in both.failures] == [(0, False)]
    assert "look-around" in both.failures[0].message
    assert len(free) == 4096
    assert len(digits) < 4096


def test_a_grammar_that_takes_too_long_fails_its_row_for_now(
    masks: SlotMasks, processes: MaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the odd slots is stopped for a while."""
    masks.start(0, DIGITS, NONE, NONE)
    step(masks, [0], [0]).wait()
    monkeypatch.setattr(slot_masks, "MAX_WAIT", MAX_WAIT)
    _, stopped = children_of(processes.pid)
    os.kill(stopped, signal.SIGSTOP)
    try:
        masks.start(1, DIGITS, NONE, NONE)
        both = step(masks, [0, 1], [0, 0])
        began = time.monotonic()
        both.wait()
        assert MAX_WAIT <= time.monotonic() - began < 5 * MAX_WAIT
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert [(failure.row // 2, failure.retryable) for failure in both.failures] == [(1, True)]
    assert len(allowed(both)[0]) < 4096
    later = step(masks, [1], [5])
    later.wait()
    assert not later.failures
    # The slot serves the next sequence.
    monkeypatch.setattr(slot_masks, "MAX_WAIT", 20)
    masks.start(1, DIGITS, NONE, NONE)
    assert len(allowed(step(masks, [1], [0]))[0]) < 4096


def test_a_sequence_that_left_its_slot_does_not_touch_the_next(masks: SlotMasks) -> None:
    (four,) = GRAMMARS.tokenizer.tokenize_str("4")
    masks.start(0, DIGITS, NONE, NONE)
    old = step(masks, [0], [0])
    old.wait()
    masks.start(0, Constraint(LLMatcher.grammar_from_regex("x{2}"), "", EOS), NONE, NONE)
    new = step(masks, [0], [0])
    old.advance(np.array([four], np.int32))
    names = [GRAMMARS.tokenizer.decode_bytes([token]) for token in allowed(new)[0]]
    assert set(names) <= {b"x", b"xx"}


def test_forced_tokens_are_known_with_the_tokens_before(
    processes: MaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_masks, "MAX_WAIT", 20)
    masks = SlotMasks(processes, drafts=True)
    word = LLMatcher.grammar_from_regex("[ab](unlikely){2}")
    masks.start(2, Constraint(word, "", EOS), NONE, NONE)
    first = step(masks, [2], [0])
    first.wait()
    assert first.forced() == {}
    (letter,) = GRAMMARS.tokenizer.tokenize_str("a")
    first.advance(np.array([letter], np.int32))
    second = step(masks, [2], [1])
    (forced,) = second.forced().values()
    assert GRAMMARS.tokenizer.decode_str(forced) == "unlikelyunlikely"


def test_a_long_message_is_cut() -> None:
    memory = MaskMemory(3, 4)
    memory.note_failure(1, 7, "é" * 5000, "grammar")
    message, field = memory.failure(1)
    assert field == "grammar"
    assert set(message) == {"é"}
    assert 1000 < len(message) < 5000
    assert memory.failed.tolist() == [0, 7, 0]


def test_tokens_go_round_in_a_ring() -> None:
    memory = MaskMemory(2, 4)
    places = len(memory.tokens)
    rows = np.arange(3 * (places - 1), dtype=np.int32).reshape(-1, 3)
    for begin in (0, 1, places - 1, 5 * places + 7):
        memory.put_tokens(begin, rows)
        end = begin + len(rows)
        np.testing.assert_array_equal(memory.get_tokens(begin, end), rows)
        np.testing.assert_array_equal(memory.get_tokens(end - 2, end), rows[-2:])


def test_memory_is_shared_by_its_descriptor() -> None:
    one = MaskMemory(3, 4)
    other = MaskMemory(3, 4, os.dup(one.fd))
    one.masks[2, 3], one.ready[2] = 5, stamp(1, 2)
    assert other.masks[2, 3] == 5
    assert other.ready[2] == stamp(1, 2)
    assert stamp(1, -1) < stamp(1, 0) < stamp(1, 1) < last_stamp(1) < stamp(2, -1)


@pytest.mark.parametrize("which", ["the first", "another"])
def test_the_end_of_a_mask_process_is_an_error_and_nobody_waits(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_masks, "MAX_WAIT", 20)
    errors: list[BaseException] = []
    started = MaskProcesses(MaskMemory(8, GRAMMARS.words), 2, errors.append)
    started.launch(WorkerConfig(model="embedded"), FOLDER, None, 4096)
    assert started.ready()
    masks = SlotMasks(started)
    masks.start(0, DIGITS, NONE, NONE)
    first, ahead = step(masks, [0], [0]), step(masks, [0], [1])
    first.wait()
    children = children_of(started.pid)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(ahead.wait)
        os.kill(started.pid if which == "the first" else children[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="a mask process has ended"):
            waiting.result(10)
    deadline = time.monotonic() + 10
    while not errors and time.monotonic() < deadline:
        time.sleep(0.01)
    (error,) = errors
    assert "has ended with status" in str(error)
    started.close()
    while any(map(running, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(running, children))


def test_an_error_that_nobody_expects_fails_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a panic in a grammar's library."""
    advance = MaskedSequence.advance

    def fails(sequence: MaskedSequence, token: int) -> None:
        if token == 7:
            raise SystemError("a panic")
        advance(sequence, token)

    memory, event = MaskMemory(4, GRAMMARS.words), os.eventfd(0)
    read, send = Pipe(duplex=False)
    server = MaskServer(GRAMMARS, memory, (0, 1), os.dup(read.fileno()), event, event)
    monkeypatch.setattr(MaskedSequence, "advance", fails)
    (four,) = GRAMMARS.tokenizer.tokenize_str("4")
    for slot in (0, 1):
        start = Start(slot, 1, DIGITS, b"", b"", False)
        server.begin(start)
    server.advance([[0, 1, 7], [1, 1, four]])
    assert memory.ready[:2].tolist() == [last_stamp(1), stamp(1, 1)]
    assert memory.failed[:2].tolist() == [1, 0]
    assert "a panic" in memory.failure(0)[0]
    send.close()
