"""Masks of one sequence: allowed tokens, allowed ends, and rebuilding from tokens."""

import dataclasses
import random

import numpy as np
import pytest
from llguidance import LLMatcher

from pagewire.limits import INT32_MAX
from pagewire.models import eos_token_ids, resolve_model
from pagewire.worker.protocol.constraints.constraint import Constraint
from pagewire.worker.protocol.constraints.grammars import GrammarError, Grammars, grammars_of
from pagewire.worker.protocol.constraints.masked_sequence import MaskedSequence

FOLDER = resolve_model("embedded")
VOCAB = 4096
EOS = eos_token_ids(FOLDER)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NONE = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    found = grammars_of(FOLDER, VOCAB)
    assert found is not None
    return found


def regex(pattern: str, **fields) -> Constraint:
    grammar = LLMatcher.grammar_from_regex(pattern)
    return Constraint(**{"grammar": grammar, "end_token_ids": EOS, **fields})


def ids(grammars: Grammars, text: str) -> np.ndarray:
    return np.array(grammars.tokenizer.tokenize_str(text), np.int32)


def begin(grammars: Grammars, constraint: Constraint, output=NONE, prompt=NONE) -> MaskedSequence:
    return MaskedSequence(constraint, grammars, prompt, output)


def allowed(sequence: MaskedSequence) -> set[int]:
    mask = np.full(VOCAB // 32, -1, np.int32)
    if sequence.matcher is not None:
        sequence.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    sequence.narrow(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_every_prefix_of_an_output_rebuilds_the_same_state(grammars: Grammars) -> None:
    """A resume, a preemption or another worker rebuilds a sequence in this way."""
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    for seed in range(5):
        constraint = Constraint(grammar, "<go>", EOS, min_tokens=12)
        draw, output, masks = random.Random(seed), [*ids(grammars, "well <go>").tolist()], []
        sequence = begin(grammars, constraint, np.array(output, np.int32))
        started = len(output)
        while not sequence.ended and len(output) < 60:
            masks.append(allowed(sequence))
            output.append(draw.choice(sorted(masks[-1])))
            sequence.advance(output[-1])
        for length, mask in enumerate(masks, started):
            again = begin(grammars, constraint, np.array(output[:length], np.int32))
            assert allowed(again) == mask
            assert again.index == length


def test_a_complete_grammar_leaves_only_the_end(grammars: Grammars) -> None:
    sequence = begin(grammars, regex("[0-9]{2}"), ids(grammars, "42"))
    assert allowed(sequence) == set(EOS)
    sequence.advance(EOS[0])
    assert sequence.ended


def test_the_end_may_come_where_the_grammar_is_complete(grammars: Grammars) -> None:
    digits = {token for token in range(VOCAB) if grammars.tokenizer.decode_bytes([token]).isdigit()}
    assert allowed(begin(grammars, regex("[0-9]+"))) == digits
    assert allowed(begin(grammars, regex("[0-9]+"), ids(grammars, "7"))) == digits | set(EOS)


@pytest.mark.parametrize("min_tokens", [2, INT32_MAX])
def test_min_tokens_bans_the_end_unless_nothing_else_may_come(
    grammars: Grammars, min_tokens: int
) -> None:
    """`ignore_eos` is the same without a bound."""
    more = begin(grammars, regex("[0-9]+", min_tokens=min_tokens), ids(grammars, "7"))
    assert not allowed(more) & set(EOS)
    done = begin(grammars, regex("[0-9]", min_tokens=min_tokens), ids(grammars, "7"))
    assert allowed(done) == set(EOS)


def test_stop_tokens_end_where_the_grammar_is_complete(grammars: Grammars) -> None:
    constraint = regex("[0-9]", end_token_ids=(*EOS, 99))
    assert 99 not in allowed(begin(grammars, constraint))
    assert allowed(begin(grammars, constraint, ids(grammars, "7"))) == {*EOS, 99}
    only = regex("[0-9]", end_token_ids=(99,))
    assert allowed(begin(grammars, only, ids(grammars, "7"))) == {99}


def test_a_constraint_begins_after_a_text(grammars: Grammars) -> None:
    constraint = regex("[0-9]", begin_after="</think>")
    before = begin(grammars, constraint, ids(grammars, "some thought </thi"))
    assert before.matcher is None
    assert allowed(before) == set(range(VOCAB)) - set(EOS)
    after = begin(grammars, constraint, ids(grammars, "some thought </think>"))
    assert allowed(after) == allowed(begin(grammars, regex("[0-9]")))
    at_once = begin(grammars, constraint, prompt=ids(grammars, "<think>\n</think>\n\n"))
    assert allowed(at_once) == allowed(after)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_allowed_tokens_and_bans(grammars: Grammars) -> None:
    some = Constraint(end_token_ids=EOS, allowed_token_ids=ints(5, 9, 40, EOS[0]))
    assert allowed(begin(grammars, some)) == {5, 9, 40, EOS[0]}
    bans = Constraint(
        end_token_ids=EOS,
        allowed_token_ids=ints(5, 9, 40),
        banned_token_ids=ints(5, 9, 40, 9, 9, 40),
        banned_lengths=ints(1, 3, 2),
    )
    assert allowed(begin(grammars, bans)) == {9, 40}
    assert allowed(begin(grammars, bans, ints(40))) == {9, 40}
    assert allowed(begin(grammars, bans, ints(9))) == {9}
    assert allowed(begin(grammars, bans, ints(9, 40))) == {40}
    assert allowed(begin(grammars, bans, ints(9, 40), prompt=ints(9, 40))) == {40}
    assert allowed(begin(grammars, bans, prompt=ints(9))) == {9, 40}  # of the output only


def test_bans_within_a_grammar(grammars: Grammars) -> None:
    (four, five) = ids(grammars, "4")[0], ids(grammars, "5")[0]
    not_four = {"banned_token_ids": ints(four), "banned_lengths": ints(1)}
    assert allowed(begin(grammars, regex("[45]", **not_four))) == {five}
    # A complete grammar ends, even if the end is not among the allowed tokens.
    only = regex("[45]", allowed_token_ids=ints(five))
    assert allowed(begin(grammars, only, ints(five))) == set(EOS)


def test_fields_that_exclude_every_token_are_named(grammars: Grammars) -> None:
    four = ids(grammars, "4")[0]
    not_four = {"banned_token_ids": ints(four), "banned_lengths": ints(1)}
    for constraint, named in (
        (regex("4", **not_four, grammar_field="response_format"), "bad_words and response_format"),
        (Constraint(allowed_token_ids=ints(four), **not_four), "allowed_token_ids and bad_words"),
        (
            regex("4", end_token_ids=(four,), min_tokens=1, grammar_field="response_format"),
            "response_format and min_tokens",
        ),
    ):
        with pytest.raises(GrammarError, match=f"index 0 of the output: {named} exclude all") as e:
            allowed(begin(grammars, constraint))
        assert e.value.field == named.split()[0]


def test_arrays_of_a_constraint_are_checked() -> None:
    for fields in (
        {"allowed_token_ids": ints(VOCAB)},
        {"banned_token_ids": ints(-1), "banned_lengths": ints(1)},
        {"banned_token_ids": ints(1, 2), "banned_lengths": ints(1)},
        {"banned_token_ids": ints(1), "banned_lengths": ints(0, 1)},
        {"begin_after": "x"},
    ):
        assert Constraint(end_token_ids=EOS, **fields).fault(VOCAB) is not None


def test_faults_name_what_is_wrong(grammars: Grammars) -> None:
    sequence = begin(grammars, regex("[0-9]+"), ids(grammars, "1"))
    with pytest.raises(GrammarError, match=r"^the grammar does not allow token") as drawn:
        sequence.advance(*ids(grammars, "x"))
    assert not drawn.value.field
    with pytest.raises(GrammarError, match=r"^resume_token_ids: the grammar does not") as resumed:
        begin(grammars, regex("[0-9]+"), ids(grammars, "1x"))
    assert resumed.value.field == "resume_token_ids"
    with pytest.raises(GrammarError, match="uniqueItems"):
        begin(
            grammars,
            Constraint(LLMatcher.grammar_from_json_schema({"uniqueItems": True}), "", EOS),
        )
    assert Constraint("g", "", ()).fault(VOCAB) is not None
    assert Constraint("g", "", (VOCAB,)).fault(VOCAB) is not None
    assert Constraint("g", "", EOS).fault(VOCAB) is None


def test_reasoning_ends_when_its_budget_is_spent(grammars: Grammars) -> None:
    end = ids(grammars, "</think>")
    limit = Constraint(
        end_token_ids=EOS,
        max_reasoning_tokens=3,
        reasoning_end="</think>",
        reasoning_end_ids=end,
    )
    words = ids(grammars, "one two three four five")
    assert len(words) >= 5
    known = words[:3].tolist()
    for count in range(3):
        assert len(allowed(begin(grammars, limit, words[:count]))) == VOCAB
    for token in end.tolist():
        assert allowed(begin(grammars, limit, np.array(known, np.int32))) == {token}
        known.append(token)
    assert len(allowed(begin(grammars, limit, np.array(known, np.int32)))) == VOCAB
    early = np.concatenate((words[:1], end, words))
    for count in range(len(early)):
        expected = VOCAB if count not in range(3, 1 + len(end)) else 1
        assert len(allowed(begin(grammars, limit, early[:count]))) == expected
    none = dataclasses.replace(limit, max_reasoning_tokens=0)
    assert allowed(begin(grammars, none)) == {int(end[0])}


def test_a_budget_counts_from_the_tag_that_begins_the_reasoning(grammars: Grammars) -> None:
    end, tag = ids(grammars, "</think>"), ids(grammars, "\n<think>")
    limit = Constraint(
        end_token_ids=EOS,
        max_reasoning_tokens=2,
        reasoning_begin="<think>",
        reasoning_end="</think>",
        reasoning_end_ids=end,
    )
    words = ids(grammars, "one two three four five")
    reasoned = np.concatenate((tag, words))
    for count in range(len(tag) + 2):
        assert len(allowed(begin(grammars, limit, reasoned[:count]))) == VOCAB
    assert allowed(begin(grammars, limit, reasoned[: len(tag) + 2])) == {int(end[0])}
    assert len(allowed(begin(grammars, limit, words))) == VOCAB, "the model does not reason"


def test_a_grammar_begins_after_reasoning_that_was_cut(grammars: Grammars) -> None:
    end = ids(grammars, "</think>")
    both = regex(
        "a+",
        begin_after="</think>",
        max_reasoning_tokens=1,
        reasoning_end="</think>",
        reasoning_end_ids=end,
    )
    cut = np.concatenate((ids(grammars, "x")[:1], end))
    following = {
        grammars.tokenizer.decode_bytes([token]) for token in allowed(begin(grammars, both, cut))
    }
    assert following
    assert all(set(each) == set(b"a") for each in following)


def test_a_grammar_with_too_many_alternatives_is_named(grammars: Grammars) -> None:
    rules = " | ".join(f'"choice {number}"' for number in range(2500))
    lark = LLMatcher.grammar_from_lark(f'start: "x" /[0-9]+/ "y" rest\nrest: {rules}')
    constraint = Constraint(lark, "", EOS, grammar_field="guided_grammar")
    with pytest.raises(GrammarError, match=r"too complex at token 2 .*; simplify it") as caught:
        begin(grammars, constraint, ids(grammars, "x7y"))
    assert caught.value.field == "guided_grammar"
