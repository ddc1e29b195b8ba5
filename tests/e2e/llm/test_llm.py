"""The Python API with the real processes and the embedded model."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.llm import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from pagewire.v1 import inference_pb2 as pb
from support.waiting import until

SETTINGS = {"num_blocks": 600, "num_slots": 32}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello! What can you do?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as started:
        yield started


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def is_idle(llm: LLM) -> bool:
    load = llm._stack.connected().schedulers.links
    [link] = load.values()
    return (link.load.running, link.load.waiting, link.load.used_blocks) == (0, 0, 0)


def kill(llm: LLM, service: str) -> int:
    pid = llm._stack.pids[service]
    os.kill(pid, signal.SIGKILL)
    return pid


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def python(script: str, *arguments: str) -> "subprocess.Popen[str]":
    """A script in a new interpreter."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["Once upon a time", "The fox", "Count to five"] * 20
    lengths = [1 + i % 7 for i in range(60)]
    outputs = llm.generate(prompts, [LONG.replace(max_tokens=length) for length in lengths])
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert all(output.finished for output in outputs)


def test_a_text_and_its_token_ids_give_the_same(llm):
    [by_text] = llm.generate("Once upon a time", GREEDY)
    ids = llm.tokenize("Once upon a time")
    assert by_text.prompt_token_ids == ids
    [by_ids] = llm.generate(ids, GREEDY)
    assert (by_ids.prompt, by_ids.prompt_token_ids) == (None, ids)
    assert by_ids.outputs == by_text.outputs
    assert by_text.outputs[0].text == llm.detokenize(by_text.outputs[0].token_ids)


def test_wrong_arguments_are_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match="on_error is 'ignore'; give raise or return"):
        llm.generate("Once", GREEDY, on_error="ignore")
    with pytest.raises(RequestError, match=r"token_ids\[0\] is 4096") as caught:
        llm.detokenize([4096])
    assert caught.value.field == "token_ids"
    with pytest.raises(RequestError, match="max_prompt_chars") as caught:
        llm.tokenize("a" * 5_000_000)
    assert caught.value.field == "prompt"


def test_a_chat_with_several_outputs_and_log_probabilities(llm):
    params = SamplingParams(n=2, seed=7, max_tokens=8, logprobs=1)
    one, two = llm.chat([HELLO, HELLO], params)
    assert tokens_of([one]) == tokens_of([two])
    assert [output.index for output in one.outputs] == [0, 1]
    first = one.outputs[0]
    assert all(token in place for token, place in zip(first.token_ids, first.logprobs, strict=True))
    places = zip(first.token_ids, first.logprobs, strict=True)
    total = sum(place[token].logprob for token, place in places)
    assert first.cumulative_logprob == pytest.approx(total)
    assert len(one.prompt_token_ids) > 5


def test_a_prompt_is_scored_without_an_output(llm: LLM) -> None:
    greedy = llm.generate("Once upon a time", GREEDY)[0]
    likely = [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]
    scored = llm.generate(likely, SamplingParams(prompt_logprobs=1, max_tokens=0))[0]
    assert (scored.outputs[0].token_ids, scored.outputs[0].finish_reason) == ([], "length")
    assert scored.prompt_logprobs[0] is None
    for token, place in zip(likely[1:], scored.prompt_logprobs[1:], strict=True):
        assert next(iter(place)) == token
    for place in scored.prompt_logprobs[len(greedy.prompt_token_ids) :]:
        assert [value.rank for value in place.values()] == [1]
    (chat,) = llm.chat(HELLO, SamplingParams(prompt_logprobs=0, max_tokens=1))
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids)


def test_an_output_can_be_constrained(llm):
    digits = SamplingParams(structured_outputs={"regex": "[0-9]{3}"}, max_tokens=8)
    words = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, max_tokens=8)
    number, word = (output.outputs[0] for output in llm.generate(["1 + 1 = "] * 2, [digits, words]))
    assert re.fullmatch("[0-9]{3}", number.text)
    assert word.text in ("yes", "no")
    with pytest.raises(RequestError, match="regex") as caught:
        SamplingParams(structured_outputs={"regex": 5})
    assert "structured_outputs" in caught.value.field


def test_beam_search_returns_the_best_outputs(llm):
    params = SamplingParams(use_beam_search=True, n=2, best_of=4, temperature=0, max_tokens=6)
    [output] = llm.generate("The fox", params)
    assert len(output.outputs) == 2
    assert all(each.token_ids and each.text for each in output.outputs)


def test_errors_name_prompt_and_field(llm):
    with pytest.raises(RequestError, match=r"^prompt 1: .* 1000000 in the completion") as caught:
        llm.generate(["a", "b"], [GREEDY, SamplingParams(max_tokens=10**6)])
    assert caught.value.field == "max_tokens"
    good, bad = llm.generate(
        ["a", "b"], [GREEDY, SamplingParams(max_tokens=10**6)], on_error="return"
    )
    assert good.error is None
    assert good.outputs[0].text
    assert (bad.outputs, bad.finished, bad.error.field) == ([], True, "max_tokens")
    until(lambda: is_idle(llm), 10)
    with pytest.raises(RequestError, match="did you mean"):
        llm.chat(HELLO, add_generation_promt=False)
    assert llm.generate([]) == []


def test_it_works_beside_a_running_event_loop(llm):
    async def notebook_cell() -> str:
        return llm.generate("The fox", GREEDY)[0].outputs[0].text

    assert asyncio.run(notebook_cell()) == llm.generate("The fox", GREEDY)[0].outputs[0].text


def test_threads_may_share_it(llm):
    expected = llm.generate("The fox", GREEDY)[0].outputs
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(llm.generate("The fox", GREEDY)[0].outputs))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [expected] * 8


@pytest.mark.parametrize("service", ["worker-0", "scheduler"])
def test_a_killed_process_changes_nothing(llm, service):
    prompts = ["Once upon a time", "The fox", "Hello", "Count to five"]
    params = [LONG, LONG.replace(temperature=1.0, seed=5), LONG.replace(logprobs=1), LONG]
    undisturbed = llm.generate(prompts, params)
    [link] = llm._stack.connected().schedulers.links.values()
    [model] = link.models
    generated = link._metrics.of(model).generated_tokens
    before = generated._value.get()

    def kill_soon() -> None:
        until(lambda: generated._value.get() - before > 80, 30)
        killed.append(kill(llm, service))

    killed: list[int] = []
    killer = threading.Thread(target=kill_soon)
    killer.start()
    disturbed = llm.generate(prompts, params)
    killer.join()
    assert killed
    assert llm._stack.pids[service] != killed[0]
    assert tokens_of(disturbed) == tokens_of(undisturbed)
    assert [o.outputs[0].text for o in disturbed] == [o.outputs[0].text for o in undisturbed]
    assert len(disturbed[2].outputs[0].logprobs) == 100
    assert [o.prompt_token_ids for o in disturbed] == [o.prompt_token_ids for o in undisturbed]


def test_an_interrupted_call_leaves_nothing_behind(llm):
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The fox"] * 16, LONG.replace(max_tokens=1000))
    until(lambda: is_idle(llm), 10)
    assert llm.generate("The fox", GREEDY)[0].finished


def test_the_garbage_collector_ends_the_processes():
    """Here during the start."""
    model = AsyncLLM(**SETTINGS)
    stack = model._stack
    until(lambda: len(stack.pids) == 2, 30)
    pids = list(stack.pids.values())
    assert all(map(alive, pids))
    del model
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        stack.connected()


def test_what_cannot_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="no folder with a config"):
        LLM(tmp_path / "missing")


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_processes_end_with_the_script(end):
    """At the regular end of the script without `close`, and when it is killed."""
    script = python(
        """
        import sys
        from pagewire.llm import LLM, SamplingParams
        llm = LLM(num_blocks=600)
        print(*llm._stack.pids.values(), flush=True)
        if sys.argv[1] == "kill":
            llm.generate(["The fox"] * 500, SamplingParams(max_tokens=1000, ignore_eos=True))
        """,
        end,
    )
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert len(pids) == 2
    if end == "kill":
        assert all(map(alive, pids))
        script.kill()
    _, errors = script.communicate(timeout=60)
    assert script.returncode == (0 if end == "exit" else -signal.SIGKILL), errors
    assert errors == ""
    until(lambda: not any(map(alive, pids)), 10)


async def test_a_stream_is_the_output(llm):
    expected = llm.chat(HELLO, GREEDY)[0]
    async with AsyncLLM(**SETTINGS) as streaming:
        pieces = [piece async for piece in streaming.chat(HELLO, GREEDY)]
        assert len(pieces) > 3
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        outputs = [output for piece in pieces for output in piece.outputs]
        assert "".join(output.text for output in outputs) == expected.outputs[0].text
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == expected.outputs[0].token_ids
        assert pieces[-1].prompt_token_ids == expected.prompt_token_ids
        await _many_streams_lose_nothing(streaming, llm)
        await _leaving_aborts(streaming)
        for call in (streaming.generate("a", {}), streaming.chat(HELLO, {})):
            with pytest.raises(RequestError, match="params is of type dict; give SamplingParams"):
                await anext(call)
        with pytest.raises(RequestError, match="max_tokens"):
            async for _ in streaming.generate("a", SamplingParams(max_tokens=10**6)):
                pass


async def _many_streams_lose_nothing(streaming: AsyncLLM, llm: LLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=60, ignore_eos=True) for i in range(8)]
    expected = [o.outputs[0].text for o in llm.generate(["The fox"] * 8, params)]
    num_pieces = 0

    async def text(params: SamplingParams) -> str:
        nonlocal num_pieces
        text = ""
        async for piece in streaming.generate("The fox", params):
            text += "".join(output.text for output in piece.outputs)
            num_pieces += 1
            if num_pieces == 100:
                os.kill(streaming._stack.pids["worker-0"], signal.SIGKILL)
        return text

    assert await asyncio.gather(*map(text, params)) == expected
    assert num_pieces > 100


async def _leaving_aborts(streaming: AsyncLLM) -> None:
    stream = streaming.generate("The fox", LONG.replace(max_tokens=1000))
    async for _ in stream:
        break
    await stream.aclose()
    stub = streaming._stack.connected().stub

    async def load() -> pb.Load:
        return await stub.GetLoad(pb.GetLoadRequest())

    deadline = time.monotonic() + 10
    while (now := streaming._stack.run(load())).running or now.used_blocks:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_a_closed_one_says_so(llm):
    """The last test with the shared one."""
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")
