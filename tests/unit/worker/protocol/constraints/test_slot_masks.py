"""Masks of a stream: they follow the tokens of its steps, and a slow or bad grammar fails alone."""

import json
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from llguidance import LLMatcher

from pagewire.models import eos_token_ids, resolve_model
from pagewire.worker.protocol.constraints import mask_threads, slot_masks
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import compile_grammar, grammars_of
from pagewire.worker.protocol.constraints.mask_table import MaskTable
from pagewire.worker.protocol.constraints.mask_threads import MaskThreads
from pagewire.worker.protocol.constraints.slot_masks import SlotMasks, StepMasks

FOLDER = resolve_model("embedded")
EOS = eos_token_ids(FOLDER)
NONE = np.empty(0, np.int32)
DIGITS = Constraint(LLMatcher.grammar_from_regex("[0-9]{3}"), "", EOS)
GRAMMARS = grammars_of(FOLDER, 4096)


@pytest.fixture
def masks() -> Iterator[SlotMasks]:
    errors: list[BaseException] = []
    table = MaskTable(np.zeros((8, GRAMMARS.words), np.int32))
    yield SlotMasks(MaskThreads(GRAMMARS, table, errors.append))
    assert not errors


def step(masks: SlotMasks, slots: list[int], indices: list[int]) -> StepMasks:
    rows = np.arange(len(slots), dtype=np.int32) * 2  # every second row is constrained
    return masks.of_step(rows, np.array(slots, np.int32), np.array(indices))


def allowed(step: StepMasks) -> list[list[int]]:
    """The tokens that may come in each row of a step, once they are known."""
    step.wait()
    return [tokens_of(mask) for mask in step.words[step.slots]]


def tokens_of(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("many", [1, 99])
def test_masks_follow_the_tokens_of_each_row(
    masks: SlotMasks, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    monkeypatch.setattr(mask_threads, "MANY", many)
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


@pytest.mark.parametrize("many", [1, 99])
def test_a_token_that_is_not_allowed_fails_its_own_row(
    masks: SlotMasks, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    monkeypatch.setattr(mask_threads, "MANY", many)
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


def test_steps_sent_ahead_wait_for_the_tokens_before(masks: SlotMasks) -> None:
    (four,) = GRAMMARS.tokenizer.tokenize_str("4")
    masks.start(0, DIGITS, NONE, NONE)
    first, ahead = step(masks, [0], [0]), step(masks, [0], [1])
    first.wait()
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(ahead.wait()))
    waiting.start()
    time.sleep(2 * slot_masks.MAX_WAIT)  # a long step is no slow grammar
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
    masks: SlotMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = threading.Event()

    def compile_slowly(tokenizer, grammar):
        compiled.wait()
        return LLMatcher(tokenizer, grammar)

    monkeypatch.setattr(
        "pagewire.worker.protocol.constraints.grammars.compile_grammar", compile_slowly
    )
    masks.start(0, DIGITS, NONE, NONE)
    masks.start(1, Constraint(LLMatcher.grammar_from_regex("x{2}"), "", EOS), NONE, NONE)
    both = step(masks, [0, 1], [0, 0])
    began = time.monotonic()
    both.wait()
    assert time.monotonic() - began < 5 * slot_masks.MAX_WAIT
    compiled.set()
    assert (1, True) in [(failure.row // 2, failure.retryable) for failure in both.failures]


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


def test_rows_that_share_masks_have_those_of_their_own_matchers(masks: SlotMasks) -> None:
    """Streams of one schema, of which some have further demands, at different places."""
    options = {"whitespace_pattern": " ?", "lenient": False, "coerce_one_of": False}
    properties = {"a": {"type": "string"}, "b": {"enum": ["x", "yy"]}, "c": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    schema["additionalProperties"] = False
    text = json.dumps({"type": "array", "items": schema, "minItems": 60})
    grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)
    tokenizer, draw = GRAMMARS.tokenizer, random.Random(0)
    for slot in range(8):
        least = 200 if slot % 4 == 3 else 0
        masks.start(slot, Constraint(grammar, "", EOS, min_tokens=least), NONE, NONE)
    whole = [compile_grammar(tokenizer, grammar) for _ in range(8)]
    now, slots = step(masks, list(range(8)), [0] * 8), list(range(8))
    for index in range(1, 80):
        tokens = np.full(2 * len(slots), -9, np.int32)
        now.wait()
        for row, slot in enumerate(slots):
            expected = set(tokens_of(np.frombuffer(whole[slot].compute_bitmask(), np.int32)))
            found = set(tokens_of(now.words[slot]))
            if slot % 4 == 3:
                expected -= set(EOS)
            assert found == expected, (slot, index)
            texts = {token: tokenizer.decode_bytes([token]) for token in sorted(found - set(EOS))}
            short = [token for token, text in texts.items() if len(text) < 2 and text.isascii()]
            token = draw.choice(short if draw.random() < 0.8 and short else sorted(texts))
            assert whole[slot].consume_token(token)
            tokens[2 * row] = token
        now.advance(tokens)
        now = step(masks, slots, [index] * len(slots))
    assert not now.failures
