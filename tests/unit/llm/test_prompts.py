"""From a caller's inputs to requests."""

import pytest

from pagewire.gateway.api.limits import BodyLimits
from pagewire.llm import RequestError, SamplingParams
from pagewire.llm.prompts import (
    chat_task,
    completion_task,
    list_conversations,
    list_prompts,
    tasks_of,
)
from pagewire.v1 import inference_pb2 as pb

MODEL = pb.Model(id="m", max_model_len=64)
HELLO = {"role": "user", "content": "Hello"}


def sent(task, index=0):
    """A request of a task as a scheduler receives it."""
    job = task.job
    data = job.requests[index].SerializeToString() + job.common_of(index).data
    return pb.GenerateRequest.FromString(data)


def chat(messages, params=None, **fields):
    return chat_task(messages, params or SamplingParams(), fields, MODEL, BodyLimits())


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("one", ["one"]),
        ([1, 2], [[1, 2]]),
        (["a", [1], {"prompt": "b"}], ["a", [1], {"prompt": "b"}]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt_token_ids": [4]}, [{"prompt_token_ids": [4]}]),
        ([], []),
    ],
)
def test_one_prompt_or_several(given, listed):
    assert list_prompts(given) == listed


def test_one_conversation_or_several():
    assert list_conversations([HELLO]) == [[HELLO]]
    assert list_conversations([[HELLO], [HELLO, HELLO]]) == [[HELLO], [HELLO, HELLO]]


def test_texts_and_token_ids():
    text = completion_task("hi", SamplingParams(max_tokens=3, temperature=0), MODEL)
    assert (sent(text).prompt, sent(text).stop.max_tokens) == ("hi", 3)
    assert sent(text).return_prompt_token_ids
    for given in ([1, 2], (1, 2), {"prompt_token_ids": [1, 2]}):
        ids = completion_task(given, SamplingParams(), MODEL)
        assert list(sent(ids).prompt_token_ids.ids) == ids.prompt.token_ids == [1, 2]
        assert not sent(ids).return_prompt_token_ids


def test_each_output_is_a_request_with_the_next_seed():
    task = completion_task("hi", SamplingParams(n=3, seed=5), MODEL)
    assert [sent(task, i).sampling.seed for i in range(3)] == [5, 6, 7]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "is empty"),
        (["a"], "a list of token ids"),
        (5, "is a int"),
        ([1, "a"], r"prompt\[1\]"),
        ([-1], "prompt"),
        ([1] * 64, "maximum context length"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "alone"),
        ({"text": "a"}, "'text'"),
    ],
)
def test_a_prompt_that_is_not_valid_is_refused(given, message):
    with pytest.raises(RequestError, match=message):
        completion_task(given, SamplingParams(), MODEL)


def test_chat_takes_the_fields_of_the_api():
    params = SamplingParams(logprobs=2, max_tokens=4)
    task = chat([HELLO], params, add_generation_prompt=False, chat_template_kwargs={"a": 1})
    request = sent(task)
    assert [m.content for m in request.chat.messages] == ["Hello"]
    assert not request.chat.add_generation_prompt
    assert dict(request.chat.template_kwargs) == {"a": 1}
    assert (request.logprobs, request.stop.max_tokens) == (2, 4)


def test_fields_that_the_chat_template_leaves_out_are_named():
    plain = pb.Model(id="m", max_model_len=64, template_inputs=["messages"])
    fields = {"chat_template_kwargs": {"depth": 1}}
    with pytest.warns(UserWarning, match="not render messages.*name, chat_template_kwargs.depth"):
        chat_task([{**HELLO, "name": "Ada"}], SamplingParams(), fields, plain, BodyLimits())


def test_a_chat_without_max_tokens_has_no_limit_of_its_own():
    assert not sent(chat([HELLO])).stop.HasField("max_tokens")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0}, "give it in params"),
        ({"add_generation_promt": True}, "did you mean add_generation_prompt"),
        ({"stream": True}, "not a field of a chat"),
    ],
)
def test_an_unknown_field_of_a_chat_is_named(fields, message):
    with pytest.raises(RequestError, match=message):
        chat([HELLO], **fields)


def test_parameters_for_all_or_one_for_each():
    def taken(item, params):
        return (item, params)

    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    assert tasks_of(["a", "b"], one, taken) == [("a", one), ("b", one)]
    assert tasks_of(["a", "b"], [one, two], taken) == [("a", one), ("b", two)]
    assert tasks_of(["a"], None, taken) == [("a", SamplingParams())]
    with pytest.raises(RequestError, match="1 entries for 2 prompts"):
        tasks_of(["a", "b"], [one], taken)


def test_the_error_says_which_prompt_it_is():
    def make(prompt, params):
        return completion_task(prompt, params, MODEL)

    with pytest.raises(RequestError, match=r"^prompt 1: "):
        tasks_of(["a", []], None, make)
    with pytest.raises(RequestError, match=r"^prompt is empty"):
        tasks_of([[]], None, make)


@pytest.mark.parametrize("make", [chat, None])
def test_a_prompt_is_cut_to_what_the_model_takes(make):
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=14)
    task = chat([HELLO], params) if make else completion_task("hi", params, MODEL)
    assert sent(task).truncate_prompt_tokens == MODEL.max_model_len - 14


def conversations(given):
    return [chat(each) for each in list_conversations(given)]


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (list_prompts, 5, "prompts is of type int; give a text, token ids, or"),
        (list_prompts, None, "prompts is of type NoneType; give a text"),
        (list_prompts, b"x", "prompts is of type bytes; give a text"),
        (conversations, "hi", "messages is of type str; give a list of messages, or a list of"),
        (conversations, HELLO, "messages is of type dict; give a list of messages, or a list of"),
        (conversations, [HELLO, "hi"], r"messages\[1\] is of type str; give a mapping with role"),
        (conversations, [["hi"]], r"messages\[0\] is of type str; give a mapping with role"),
        (conversations, [[HELLO], "hi"], "messages is of type str; give a list of messages$"),
        (conversations, [5], "messages is of type int; give a list of messages$"),
    ],
)
def test_what_is_neither_a_prompt_nor_a_conversation_is_refused(make, given, words):
    with pytest.raises(RequestError, match=f"^{words}"):
        make(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda text: completion_task(text, SamplingParams(), MODEL),
        lambda text: chat([{"role": "user", "content": text}]),
        lambda text: SamplingParams(stop=text),
    ],
)
def test_half_a_pair_of_surrogates_is_refused(make):
    with pytest.raises(RequestError, match=r"a text has '\\ud800' at 1, half of a pair"):
        make("a\ud800")


def test_bytes_are_no_token_ids():
    with pytest.raises(RequestError, match="a prompt is a bytes; give a text"):
        completion_task(b"x", SamplingParams(), MODEL)


@pytest.mark.parametrize("given", [{"max_tokens": 3}, [{"max_tokens": 3}], ["x"]])
def test_params_of_another_type_are_refused(given):
    with pytest.raises(RequestError, match=r"type (dict|str); give SamplingParams"):
        tasks_of(["a"], given, lambda prompt, params: completion_task(prompt, params, MODEL))
    with pytest.raises(RequestError, match="type dict; give SamplingParams"):
        chat([HELLO], {"max_tokens": 3})
