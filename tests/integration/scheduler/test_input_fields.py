"""Fields that change how a prompt is rendered, tokenized and shown as text."""

import threading

import grpc
import pytest

from pagewire.v1 import inference_pb2 as pb
from support.scripted.scheduler_stack import (
    TEXT_VOCAB,
    StartStack,
    collect,
    expected,
    request,
    worker_info,
)

SHORT = pb.StopConditions(max_tokens=5, ignore_eos=True)
TURNS = [pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="assistant", content="The")]


async def refusal(start: StartStack, message: pb.GenerateRequest, **settings: object) -> str:
    stack = await start(worker_info(), **settings)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stack.stub.Generate(message))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    field = dict(caught.value.trailing_metadata())["pagewire-error-field"]
    return f"{field}: {caught.value.details()}"


async def test_special_tokens_are_shown(start: StartStack) -> None:
    stack = await start(worker_info())
    for seed in range(20):
        prompt = [seed, 7]
        tokens, text, _ = await collect(
            stack.stub.Generate(request(prompt, 60, skip_special_tokens=False))
        )
        assert text == stack.engine.tokenizer.decode(tokens, skip_special_tokens=False)
        if "<|" in text:
            break
    assert "<|" in text, "some output must have a special token"
    # After a resumption in the middle, the texts are still those of the whole.
    parts = [""]
    for resumed in (tokens[:30], tokens[:31]):
        message = request(prompt, 60, skip_special_tokens=False, resume_token_ids=resumed)
        parts.append("".join([r.text async for r in stack.stub.Generate(message)]))
    assert text.endswith(parts[1])
    assert parts[1].endswith(parts[2])


@pytest.mark.parametrize(
    ("kept", "max_tokens", "last"),
    [(3, 5, 3), (50, 5, 10), (-1, 194, 6), (-1, 199, 1), (-1, 5, 10)],
)
async def test_the_last_tokens_of_a_prompt_are_kept(
    start: StartStack, kept: int, max_tokens: int, last: int
) -> None:
    stack = await start(worker_info())
    message = request(list(range(10, 20)), max_tokens, truncate_prompt_tokens=kept)
    tokens, _, finish = await collect(stack.stub.Generate(message))
    assert finish.usage.prompt_tokens == last
    assert tokens == expected(list(range(20 - last, 20)), max_tokens)


@pytest.mark.parametrize(("words", "threaded"), [(20, False), (60, True)])
async def test_a_text_of_a_kilobyte_is_tokenized_beside_the_event_loop(
    start: StartStack, monkeypatch: pytest.MonkeyPatch, words: int, threaded: bool
) -> None:
    stack = await start(worker_info(vocab_size=TEXT_VOCAB))
    text = "The quick brown fox " * words
    tokenizer = stack.engine.tokenizer
    ids = tokenizer.encode(text).tolist()
    threads = []
    encode = tokenizer.encode

    def recorded(*args: object) -> object:
        threads.append(threading.current_thread())
        return encode(*args)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    cut = {"truncate_prompt_tokens": 50, "stop": SHORT}
    message = pb.GenerateRequest(prompt=text, **cut)
    message.sampling.temperature = 0
    tokens, _, _ = await collect(stack.stub.Generate(message))
    assert tokens == expected(ids[-50:], 5, TEXT_VOCAB)
    assert [thread is threading.main_thread() for thread in threads] == [not threaded]


async def test_the_first_tokens_of_a_prompt_are_kept(start: StartStack) -> None:
    stack = await start(worker_info(vocab_size=TEXT_VOCAB))
    cut = {"truncate_prompt_tokens": 3, "keep_prompt_start": True}
    tokens, _, finish = await collect(stack.stub.Generate(request(list(range(10, 20)), 5, **cut)))
    assert finish.usage.prompt_tokens == 3
    assert tokens == expected([10, 11, 12], 5, TEXT_VOCAB)
    ids = stack.engine.tokenizer.encode("The quick brown fox").tolist()
    message = pb.GenerateRequest(prompt="The quick brown fox", stop=SHORT, **cut)
    message.sampling.temperature = 0
    tokens, _, finish = await collect(stack.stub.Generate(message))
    assert tokens == expected(ids[:3], 5, TEXT_VOCAB)


async def test_the_side_of_a_cut_needs_its_length(start: StartStack) -> None:
    stack = await start(worker_info(vocab_size=TEXT_VOCAB))
    for given in (request([1, 2], 5), pb.GenerateRequest(prompt="The quick", stop=SHORT)):
        given.keep_prompt_start = True
        with pytest.raises(grpc.RpcError) as raised:
            await collect(stack.stub.Generate(given))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert raised.value.details() == (
            "keep_prompt_start is true, which needs truncate_prompt_tokens; set it or remove "
            "keep_prompt_start"
        )


async def test_a_text_is_cut_after_tokenization(start: StartStack) -> None:
    stack = await start(worker_info(vocab_size=TEXT_VOCAB))
    for words in (50, 240):  # above 200 tokens the whole text would be refused
        text = "The quick brown fox " * words
        ids = stack.engine.tokenizer.encode(text).tolist()
        message = pb.GenerateRequest(prompt=text, stop=SHORT, truncate_prompt_tokens=150)
        message.sampling.temperature = 0
        tokens, _, finish = await collect(stack.stub.Generate(message))
        assert finish.usage.prompt_tokens == min(150, len(ids))
        assert tokens == expected(ids[-150:], 5, TEXT_VOCAB)


@pytest.mark.parametrize("kept", [0, -2])
async def test_a_cut_must_leave_tokens(start: StartStack, kept: int) -> None:
    words = await refusal(start, request([1], 5, truncate_prompt_tokens=kept))
    assert words == f"truncate_prompt_tokens: truncate_prompt_tokens is {kept}; it must be at " + (
        "least 1, or -1"
    )


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        (pb.ChatInput(messages=TURNS[:1]), "<|start|>user\nhi<|end|>\n<|start|>assistant\n"),
        (
            pb.ChatInput(messages=TURNS, continue_final_message=True),
            "<|start|>user\nhi<|end|>\n<|start|>assistant\nThe",
        ),
    ],
)
async def test_conversations_are_rendered(start: StartStack, chat: pb.ChatInput, text: str) -> None:
    stack = await start(worker_info(vocab_size=TEXT_VOCAB))
    ids = stack.engine.tokenizer.encode(text, False).tolist()
    tokens, _, _ = await collect(stack.stub.Generate(pb.GenerateRequest(chat=chat, stop=SHORT)))
    assert tokens == expected(ids, 5, TEXT_VOCAB)


DOCUMENTS = "{% for d in documents %}{{ d.title }}{% endfor %}"


async def test_a_request_may_bring_its_template(start: StartStack) -> None:
    stack = await start(worker_info(vocab_size=TEXT_VOCAB), trust_request_chat_template=True)
    chat = pb.ChatInput(messages=TURNS, chat_template="{{ messages | length }} quick " + DOCUMENTS)
    for title in ("fox", "dog"):
        chat.documents.add().update({"title": title})
    ids = stack.engine.tokenizer.encode("2 quick foxdog", False).tolist()
    tokens, _, _ = await collect(stack.stub.Generate(pb.GenerateRequest(chat=chat, stop=SHORT)))
    assert tokens == expected(ids, 5, TEXT_VOCAB)
    await stack.settle()


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        (pb.ChatInput(messages=TURNS, chat_template="{% if"), "chat_template: chat_template: "),
        (pb.ChatInput(messages=TURNS, chat_template="x" * 70_000), "chat_template: chat_template"),
        (
            pb.ChatInput(messages=TURNS, chat_template="{{ ().__class__.__base__ }}"),
            "messages: the model's chat template refuses",
        ),
        (
            pb.ChatInput(messages=TURNS, documents=[{"title": "x"}]),
            "documents: this model's chat template takes no documents",
        ),
        (
            pb.ChatInput(messages=TURNS, continue_final_message=True, add_generation_prompt=True),
            "continue_final_message: continue_final_message and add_generation_prompt exclude",
        ),
        (
            pb.ChatInput(messages=[pb.ChatMessage(role="user", content="x", null_content=True)]),
            "messages[0].null_content: messages[0].null_content is true, and the message has",
        ),
    ],
)
async def test_inputs_that_cannot_be_rendered_are_refused(
    start: StartStack, chat: pb.ChatInput, words: str
) -> None:
    message = pb.GenerateRequest(chat=chat, stop=SHORT)
    assert (await refusal(start, message, trust_request_chat_template=True)).startswith(words)


async def test_templates_of_requests_need_a_setting(start: StartStack) -> None:
    chat = pb.ChatInput(messages=TURNS, chat_template="x")
    words = await refusal(start, pb.GenerateRequest(chat=chat, stop=SHORT))
    assert words.startswith("chat_template: chat_template is not allowed here")
    assert "--trust-request-chat-template" in words


async def test_a_template_without_end_costs_only_its_request(start: StartStack) -> None:
    stack = await start(
        worker_info(), trust_request_chat_template=True, parse_timeout=2.0, tokenizer_processes=1
    )
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    memory = (
        "{% set x = namespace(v='x' * 999999) %}"
        "{% for i in range(99999) %}{% set x.v = x.v ~ x.v %}{% endfor %}"
    )
    for template in (loop, memory):
        chat = pb.ChatInput(messages=TURNS, chat_template=template)
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(stack.stub.Generate(pb.GenerateRequest(chat=chat, stop=SHORT)))
        tokens, _, _ = await collect(stack.stub.Generate(request([4, 5], 3)))
        assert tokens == expected([4, 5], 3)
    await stack.settle()
