"""The prompts in an answer: offsets, bytes, bounds, and waiting candidates."""

import numpy as np
import pytest

from pagewire.errors import Code, RequestError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.prompt_log import PromptBudget, PromptLog, PromptWishes
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.packing import pack, pack_floats
from pagewire.v1 import inference_pb2 as pb

# A token of the tokenizer's own, a word, both parts of a character, a word with a space.
PIECES = {1: b"<s>", 4: b" a", 7: b"\xe2\x80", 9: b"\x93", 12: b" fox"}
TOKENS = [1, 4, 7, 9, 12]
TEXT = "a\u2013 fox"


def output(top: int = 1, text: str = "") -> pb.PromptOutput:
    """A message about TOKENS: each place has its own token as the likeliest, then token 4."""
    rows = len(TOKENS) - 1
    likeliest = [[token, 4, 4][:top] for token in TOKENS[1:]]
    return pb.PromptOutput(
        text=text,
        token_ids=pack(TOKENS),
        logprobs=pack_floats(np.arange(rows, dtype=np.float32) * -1),
        ranks=pack(range(1, rows + 1)),
        top_token_ids=pack(np.array(likeliest, np.int32)),
        top_logprobs=pack_floats(np.tile(np.arange(top, dtype=np.float32) * -1, rows)),
        distinct_ids=pack(list(PIECES)),
        distinct_sizes=[len(piece) for piece in PIECES.values()],
        distinct_bytes=b"".join(PIECES.values()),
    )


def log(most: int = 100, choices: int = 1, **wishes: object) -> PromptLog:
    return PromptLog(PromptWishes(**wishes), PromptBudget(most, choices))


@pytest.mark.parametrize("step", [1, 2, 99])
def test_offsets_are_those_in_the_echoed_text(step: int) -> None:
    prompt = log(echo=True, text=TEXT, echoed_top=1)
    prompt.receive(output())
    echoed, taken = prompt.echoed(), []
    while echoed.waiting:
        taken += echoed.take(step)
    assert [each.token.data for each in taken] == [PIECES[token] for token in TOKENS]
    assert [each.token.logprob for each in taken] == [None, 0, -1, -2, -3]
    assert [[other.data for other in each.top] for each in taken] == [
        [],
        *([PIECES[token]] for token in TOKENS[1:]),
    ]
    # "<s>" and the space before "a" are not in the text; the dash ends with its second token.
    assert [each.offset for each in taken] == [0, 0, 1, 1, 2]


def test_tokens_have_as_many_likeliest_ones_as_a_field_asks_for() -> None:
    prompt = log(echo=True, text=TEXT, echoed_top=0, top=2)
    assert prompt.wishes.num_top == 2
    prompt.receive(output(top=2))
    assert all(each.top == [] for each in prompt.echoed().take())
    (first, second) = prompt.scored(2, 4, top=2)
    assert (first.token.token_id, first.rank) == (7, 2)
    assert [other.token_id for other in first.top] == [7, 4]
    assert [other.data for other in second.top] == [b"\x93", b" a"]
    assert [other.logprob for other in second.top] == [0, -1]


def test_an_answer_has_a_bounded_number_of_log_probabilities() -> None:
    budget = PromptBudget(most=40, choices=2)
    logs = [PromptLog(PromptWishes(top=1), budget) for _ in range(3)]
    for prompt in logs[:2]:
        prompt.receive(output())  # 4 tokens with 2 values each, twice
        prompt.receive(output())  # counts once
    with pytest.raises(RequestError, match=r"more than 40 .*max_prompt_logprobs") as refused:
        logs[2].receive(output())
    assert refused.value.code is Code.INVALID_ARGUMENT


def candidates(prompt: PromptLog, eager: bool) -> tuple[list[Generation], UpdateQueue[Generation]]:
    updates: UpdateQueue[Generation] = UpdateQueue()
    asking = pb.GenerateRequest(logprobs=0, prompt_logprobs=prompt.wishes.num_top)
    requests = [asking, pb.GenerateRequest(logprobs=0)]
    made = [
        Generation(request, index, 0, updates, eager, prompt=prompt)
        for index, request in enumerate(requests)
    ]
    return made, updates


async def test_candidates_wait_for_the_prompt_that_one_of_them_gets() -> None:
    prompt = log(echo=True, text=TEXT, echoed_top=1)
    (asking, other), updates = candidates(prompt, eager=True)
    other.extend(b"", b"text", 1.0)
    other.receive_prompt(output())
    assert not prompt.arrived, "the other candidate has not asked for it"
    assert not other.queued
    asking.receive_prompt(output())
    assert await updates.take() == [other]
    asking.extend(b"", b"text", 1.0)
    assert await updates.take() == [asking]
    assert asking.next_attempt() != b""
    resumed = pb.GenerateRequest.FromString(asking.next_attempt())
    assert not resumed.HasField("prompt_logprobs")


async def test_a_candidate_that_has_ended_is_announced_when_the_prompt_arrives() -> None:
    prompt = log(top=1)
    (asking, other), updates = candidates(prompt, eager=False)
    other.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH))
    assert not other.queued
    assert pb.GenerateRequest.FromString(asking.next_attempt()).prompt_logprobs == 1
    asking.receive_prompt(output())
    assert await updates.take() == [other]
    asking.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH))
    assert await updates.take() == [asking]


async def test_an_end_without_the_prompt_is_a_failure() -> None:
    (asking, _), updates = candidates(log(top=1), eager=True)
    asking.end(pb.Finish(reason=pb.FINISH_REASON_LENGTH))
    assert await updates.take() == [asking]
    assert asking.failure is not None
    assert "nothing of the prompt" in asking.failure.message


def test_a_text_alone_needs_no_scheduler() -> None:
    prompt = log(echo=True, text=TEXT)
    assert prompt.arrived
    decoded = log(echo=True)
    assert not decoded.arrived
    decoded.receive(pb.PromptOutput(text=TEXT, token_ids=pack(TOKENS)))
    assert (decoded.arrived, decoded.text, decoded.num_tokens) == (True, TEXT, 5)
