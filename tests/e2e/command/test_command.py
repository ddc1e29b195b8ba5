"""A command worker with a real program that is killed, hangs and writes nonsense."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagewire.llm import LLM, AsyncLLM, RequestError, SamplingParams
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import inference_pb2_grpc
from support.programs import scripted_model as scripted
from support.waiting import until

PROMPT = [7, 8, 9]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


class Stack:
    """An LLM with the scripted program, and the messages that the program received."""

    def __init__(self, folder: Path) -> None:
        self.log, self.mark = folder / "log", folder / "mark"
        program = f"{sys.executable} {scripted.__file__} {self.log} {self.mark}"
        self.settings = {"backend": "command", "command": program, "command_timeout": 1.0}
        self.llm = LLM(**self.settings, num_slots=64)

    def received(self, kind: str) -> list[dict]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["type"] == kind]

    def tokens(self, *prompts: list[int], params: SamplingParams = PARAMS) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in self.llm.generate(list(prompts), params)]

    def program(self) -> int:
        """The process id of the program: the worker's child."""
        worker = self.llm._stack.pids["worker-0"]
        children = Path(f"/proc/{worker}/task").glob("*/children")
        return next(int(pid) for each in children for pid in each.read_text().split())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    started = Stack(tmp_path_factory.mktemp("program"))
    with started.llm:
        yield started


@pytest.fixture(autouse=True)
def _fresh(stack: Stack) -> None:
    stack.mark.unlink(missing_ok=True)


def prompts(count: int, first: int = 7) -> list[list[int]]:
    return [[first, 8, number] for number in range(count)]


def test_many_sequences_run_together(stack):
    asked = prompts(100)  # more than the slots
    assert stack.tokens(*asked) == [scripted.expected(prompt, 40) for prompt in asked]


def test_the_program_gets_the_prompt_and_the_parameters(stack):
    stack.tokens(PROMPT, params=PARAMS.replace(temperature=0.5, seed=11, max_tokens=3))
    generate = stack.received("generate")[-1]
    assert generate["prompt_token_ids"] == PROMPT
    assert generate["output_token_ids"] == []
    assert generate["max_tokens"] == 3
    assert generate["stop_token_ids"] == []  # ignore_eos
    assert generate["sampling"] == {"temperature": 0.5, "top_p": pytest.approx(0.95), "seed": 11}


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"top_k": 3}, "top_k"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": 1, "best_of": 2}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "use_beam_search": True, "temperature": 0}, "use_beam_search"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"logit_bias": {5: 1}}, "logit_bias"),
    ],
)
def test_what_the_program_does_not_honour_is_refused_by_name(stack, params, field):
    with pytest.raises(RequestError, match=field) as caught:
        stack.tokens(PROMPT, params=PARAMS.replace(**params))
    assert caught.value.field == field


def test_a_beam_search_over_grpc_is_refused_by_its_name(stack):
    asked = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=PROMPT), beam_search=pb.BeamSearch(width=2)
    )
    with (
        grpc.insecure_channel(stack.llm._stack.connected().address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        list(inference_pb2_grpc.InferenceStub(channel).Generate(asked))
    assert caught.value.details().startswith("beam_search is not possible with a command worker")
    assert dict(caught.value.trailing_metadata())["pagewire-error-field"] == "beam_search"


def test_a_constraint_is_refused_because_a_program_takes_none(stack):
    params = PARAMS.replace(allowed_token_ids=[5])
    with pytest.raises(RequestError, match=r"no constraints: .* an external program"):
        stack.tokens(PROMPT, params=params)


@pytest.mark.parametrize("victim", ["worker", "program"])
def test_a_killed_process_changes_nothing(stack, victim):
    asked = prompts(8)
    before = len(stack.received("generate"))

    def kill() -> None:
        until(lambda: len(stack.received("generate")) >= before + 8, 20)
        time.sleep(0.3)
        pid = stack.llm._stack.pids["worker-0"] if victim == "worker" else stack.program()
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    tokens = stack.tokens(*asked, params=PARAMS.replace(max_tokens=600))
    killer.join()
    assert tokens == [scripted.expected(prompt, 600) for prompt in asked]
    resumed = stack.received("generate")[before + 8 :]
    assert len(resumed) == 8
    assert any(line["output_token_ids"] for line in resumed)


def test_a_request_that_always_ends_the_program_fails_and_the_next_one_runs(stack):
    with pytest.raises(RequestError, match="the program ended with exit status 1"):
        stack.tokens([scripted.EXIT, 8])
    assert stack.tokens(PROMPT) == [scripted.expected(PROMPT, 40)]


@pytest.mark.parametrize("trick", ["EXIT_ONCE", "HANG_ONCE", "GARBAGE_ONCE"])
def test_a_program_that_fails_once_is_started_again(stack, trick):
    asked = [[getattr(scripted, trick), 8], *prompts(4)]
    program = stack.program()
    assert stack.tokens(*asked) == [scripted.expected(prompt, 40) for prompt in asked]
    assert stack.mark.exists()
    assert stack.program() != program


@pytest.mark.parametrize(
    ("trick", "message"),
    [
        ("BAD_TOKEN", "wrote a token id above"),
        ("ERROR", "the program refused: no such thing"),
        ("STALL", "wrote nothing for this request, while it served others"),
    ],
)
def test_a_bad_sequence_fails_alone(stack, trick, message):
    program = stack.program()
    asked = [[getattr(scripted, trick), 8], *prompts(4)]
    length = 1500 if trick == "STALL" else 60  # the others must not end while it waits
    params = [PARAMS, *[PARAMS.replace(max_tokens=length)] * 4]
    bad, *good = stack.llm.generate(asked, params, on_error="return")
    assert message in str(bad.error)
    expected = [scripted.expected(prompt, length) for prompt in asked[1:]]
    assert [output.outputs[0].token_ids for output in good] == expected
    assert stack.program() == program


def test_the_program_ends_an_output(stack):
    [output] = stack.llm.generate([scripted.FINISH, 8], SamplingParams(max_tokens=40))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[:-1] == scripted.expected([scripted.FINISH, 8], 5)
    with pytest.raises(RequestError, match="ignore_eos does not allow") as caught:
        stack.tokens([scripted.FINISH, 8])
    assert caught.value.field == "ignore_eos"


def test_an_abandoned_request_is_cancelled(stack):
    main = threading.main_thread().ident
    begun = len(stack.received("generate"))

    def interrupt() -> None:
        until(lambda: len(stack.received("generate")) == begun + 3, 20)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        stack.tokens(*prompts(3), params=PARAMS.replace(max_tokens=2000))
    abandoned = {line["id"] for line in stack.received("generate")[begun:]}
    until(lambda: abandoned <= {line["id"] for line in stack.received("cancel")}, 10)


def test_a_program_that_cannot_start_says_why():
    with pytest.raises(RuntimeError, match="no-such-program: No such file"):
        LLM(backend="command", command="no-such-program", num_slots=4)


async def test_text_survives_a_killed_worker():
    example = Path(__file__).parents[3] / "examples" / "command_model.py"
    prompt = "the cat saw the dog and the cat ran to the tree and the dog sat by the"
    params = SamplingParams(seed=3, max_tokens=60)
    command = f"{sys.executable} {example}"
    async with AsyncLLM(backend="command", command=command, num_slots=4) as llm:

        async def told(kill: bool) -> str:
            text = ""
            async for piece in llm.generate(prompt, params):
                text += piece.outputs[0].text
                if kill and len(text) > 60:
                    os.kill(llm._stack.pids["worker-0"], signal.SIGKILL)
                    kill = False
            return text

        undisturbed = await told(kill=False)
        assert len(undisturbed.split()) > 40
        assert await told(kill=True) == undisturbed
