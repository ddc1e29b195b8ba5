"""The outputs for a caller, from generations that the test fills by hand."""

from array import array

import numpy as np
import pytest

from pagewire.errors import invalid
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import CandidateReader
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.llm import RequestError, SamplingParams
from pagewire.llm.batch import generations_of
from pagewire.llm.outputs import Logprob, Pieces, Prompt, ToolCall, failed_output, whole_output
from pagewire.llm.prompts import chat_task, completion_task
from pagewire.packing import pack, pack_floats
from pagewire.v1 import inference_pb2 as pb

MODEL = pb.Model(id="m", max_model_len=64)


def started(**params):
    task = completion_task("hi", SamplingParams(**params), MODEL)
    return task, generations_of(task.job, UpdateQueue(), True, 0.0)


def receive(generation: Generation, tokens, text, candidates=None):
    """New tokens; `candidates` has (id, log probability, bytes) for each place, the token first."""
    if candidates:
        flat = [candidate for place in candidates for candidate in place]
        message = pb.MultiplexResponse(
            candidate_ids=pack([c[0] for c in flat]),
            candidate_logprobs=pack_floats(np.array([c[1] for c in flat], np.float32)),
            candidate_sizes=[len(c[2]) for c in flat],
            candidate_bytes=b"".join(c[2] for c in flat),
        )
        log = CandidateReader(message).take(len(candidates), len(candidates[0]))
        generation.logprobs.extend(log)
    generation.extend(array("i", tokens).tobytes(), text.encode(), 0.0)


def finish(generation: Generation, reason=pb.FINISH_REASON_LENGTH, **fields):
    usage = pb.Usage(prompt_tokens=2, cached_tokens=1)
    generation.receive_prompt(pb.PromptOutput(token_ids=pack([8, 9])))
    generation.end(pb.Finish(reason=reason, usage=usage, **fields))


def test_a_whole_output():
    task, [generation] = started()
    receive(generation, [1, 2], "ab")
    finish(generation, pb.FINISH_REASON_STOP, stop_string="c")
    output = whole_output(task.prompt, task.job, [generation])
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("hi", [8, 9], True)
    assert output.num_cached_tokens == 1
    [only] = output.outputs
    assert (only.text, only.token_ids, only.finish_reason) == ("ab", [1, 2], "stop")
    assert (only.stop_reason, only.logprobs, only.cumulative_logprob) == ("c", None, None)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_parts_of_a_chat(streamed):
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    model = pb.Model(id="m", max_model_len=64, tool_parser="hermes", reasoning_parser="think")
    asked = [{"role": "user", "content": "hi"}]
    task = chat_task(asked, SamplingParams(), fields, model, BodyLimits())
    [generation] = generations_of(task.job, UpdateQueue(), True, 0.0)
    call = ['{"name": "f", "arg', 'uments": {"a": 1}}']
    texts = ["<think>so</thi", f"nk>Yes.<tool_call>{call[0]}", f"{call[1]}</tool_call>"]
    if streamed:
        pieces = Pieces(task.prompt, task.job, [generation])
        for i, text in enumerate(texts[:2]):
            receive(generation, [i], text)
            [only] = pieces.take([generation]).outputs
            assert (only.text, only.content, only.tool_calls) == (text, None, [])
        receive(generation, [2], texts[2])
    else:
        receive(generation, [0, 1, 2], "".join(texts))
    finish(generation, pb.FINISH_REASON_STOP)
    if streamed:
        [only] = pieces.take([generation]).outputs
        assert only.text == texts[2]
    else:
        [only] = whole_output(task.prompt, task.job, [generation]).outputs
        assert only.text == "".join(texts)
    assert (only.content, only.reasoning) == ("Yes.", "so")
    [made] = only.tool_calls
    assert made == ToolCall(made.id, "f", '{"a": 1}')


def test_log_probabilities_are_by_token_id():
    task, [generation] = started(logprobs=1)
    places = [[(1, -0.5, b"a"), (1, -0.5, b"a")], [(2, -2.0, b"\xff"), (3, -0.25, b"c")]]
    receive(generation, [1, 2], "a", places)
    finish(generation)
    [only] = whole_output(task.prompt, task.job, [generation]).outputs
    assert only.logprobs == [
        {1: Logprob(-0.5, 1, "a")},
        {3: Logprob(-0.25, 1, "c"), 2: Logprob(-2.0, None, "\ufffd")},
    ]
    assert only.cumulative_logprob == -2.5


def test_the_best_candidates_come_first():
    task, generations = started(n=1, best_of=2)
    for generation, logprob in zip(generations, (-3.0, -1.0), strict=True):
        receive(generation, [generation.index], str(generation.index), [[(0, logprob, b"x")]])
        finish(generation)
    output = whole_output(task.prompt, task.job, generations)
    assert [(each.index, each.text) for each in output.outputs] == [(0, "1")]
    assert output.outputs[0].logprobs is None


def test_pieces_are_the_output():
    task, generations = started(n=2, logprobs=0)
    pieces = Pieces(task.prompt, task.job, generations)
    first, second = generations
    receive(first, [1], "a", [[(1, -1.0, b"a")]])
    one = pieces.take([first])
    assert [(p.index, p.text, p.token_ids) for p in one.outputs] == [(0, "a", [1])]
    assert (one.finished, one.prompt_token_ids, one.outputs[0].finished) == (False, None, False)
    receive(first, [2], "b", [[(2, -1.0, b"b")]])
    finish(first)
    receive(second, [3, 4], "cd", [[(3, -1.0, b"c")], [(4, -1.0, b"d")]])
    two = pieces.take([first, second])
    assert [(p.index, p.text, p.token_ids) for p in two.outputs] == [
        (0, "b", [2]),
        (1, "cd", [3, 4]),
    ]
    assert two.outputs[0].cumulative_logprob == -2.0
    assert not two.finished
    finish(second)
    last = pieces.take([second])
    assert last.finished
    assert last.prompt_token_ids == [8, 9]
    assert [(p.text, p.finish_reason, p.logprobs) for p in last.outputs] == [("", "length", [])]


def test_a_failed_prompt_has_its_error():
    _, generations = started()
    error = invalid("prompt", "too long")
    output = failed_output(Prompt(token_ids=[1]), generations, error)
    assert (output.error, output.outputs, output.finished) == (error, [], True)
    assert isinstance(output.error, RequestError)
    assert output.prompt_token_ids == [1]


@pytest.mark.parametrize(("given", "reason"), [([5, 2], 2), ([5], None), (None, None)])
def test_a_given_stop_token_is_the_reason(given, reason):
    """The model's own end is none, as in vLLM."""
    task, [generation] = started(stop_token_ids=given)
    receive(generation, [2], "")
    finish(generation, pb.FINISH_REASON_STOP, stop_token_id=2)
    pieces = Pieces(task.prompt, task.job, [generation])
    [only] = whole_output(task.prompt, task.job, [generation]).outputs
    [piece] = pieces.take([generation]).outputs
    for output in (only, piece):
        assert (output.finish_reason, output.stop_reason) == ("stop", reason)
