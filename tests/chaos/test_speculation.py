"""Workers with and without speculation return the same answers while processes are killed."""

import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pagewire.models import EMBEDDED_NAME, resolve_model
from support.clients.load import Answer, Question
from support.eagle_heads import save_head
from support.processes.fleet import Fleet, running_fleet
from support.processes.fleet_checks import check_answers, undisturbed
from support.processes.real_model import CLIENTS, WORKER, constrained_questions, run_with_fault
from support.shortened_model import save_shortened

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),  # at full size
]

PLAIN = WORKER
SUFFIX = (*WORKER, "--speculate=suffix")
# Too few blocks for all sequences: some are preempted.
FEW_BLOCKS = "--num-blocks=14"
CHECKED = ("--check-invariants",)

WORDS = ["red", " red", " kite", " plums", ".", " the", " end"]


def repetitive(count: int) -> list[Question]:
    """Few words are likely, so that drafts are right and wrong, and stops occur within a run."""
    tokenizer = Tokenizer.from_file(str(resolve_model("embedded") / "tokenizer.json"))
    likely = {str(tokenizer.encode(word).ids[0]): 11.0 for word in WORDS}
    made = []
    for number in range(count):
        body: dict[str, Any] = {
            "model": EMBEDDED_NAME,
            "prompt": "Say: red kite. the red kite. the red plums" * (1 + number % 3),
            "max_tokens": 60 + 9 * (number % 5),
            "logit_bias": likely,
            "temperature": [0, 0.2, 0.6, 1][number % 4],
            "seed": number,
            "stream": number % 5 != 0,
            "ignore_eos": True,
        }
        if number % 3 == 0:
            body["logprobs"] = 2
        if number % 4 == 1:
            body |= {"presence_penalty": 0.3, "frequency_penalty": 0.05}
        if number % 4 == 3:
            body["stop"] = ["kite the", "red red red", "end. the"]
        if number % 6 == 2:
            body["n"] = 2
        if number % 7 == 3:
            body |= {"ignore_eos": False, "min_tokens": 20, "stop_token_ids": [int([*likely][2])]}
        made.append(Question("/v1/completions", body))
    return made


def predicted(count: int) -> list[Question]:
    """Chats with a prediction; `predict` makes it partly right."""
    made = []
    for question in repetitive(count):
        body = {name: value for name, value in question.body.items() if name != "logprobs"}
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        body["prediction"] = {"type": "content", "content": "the end"}
        made.append(Question("/v1/chat/completions", body))
    return made


def predict(questions: list[Question], answers: list[Answer]) -> None:
    """Adds predictions to questions: their answers, with an edit in the middle."""
    for question, answer in zip(questions, answers, strict=True):
        if "prediction" in question.body:
            text = answer.texts[0]
            question.body["prediction"]["content"] = text[:80] + " plums kite and" + text[100:]


@pytest.fixture(scope="module")
def asked(requests: int, is_full_size: bool) -> list[Question]:
    """34 questions, or about `requests` at full size."""
    times = requests // 34 if is_full_size else 1
    return [*repetitive(18 * times), *predicted(8 * times), *constrained_questions(8 * times)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_answers(asked: list[Question]) -> list[Answer]:
    async with running_fleet(workers=1, worker_command=PLAIN) as fleet:
        answers = await undisturbed(fleet, asked, CLIENTS)
    ends = {reason for answer in answers for reason in answer.finish_reasons.values()}
    assert ends == {"stop", "length"}
    predict(asked, answers)
    return answers


@pytest.fixture(scope="module", params=["suffix", "draft", "eagle"])
def speculating(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    """A worker that drafts: alone, with the first layers of its model, or with a random head."""
    if request.param == "suffix":
        return SUFFIX
    folder, model = tmp_path_factory.mktemp("draft"), resolve_model("embedded")
    if request.param == "eagle":
        # It drafts only likely words, so that a random head is right often enough.
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        words = sorted({tokenizer.encode(word).ids[0] for word in WORDS})
        save_head(folder, model, drafts=len(words), tokens=words)
    else:
        save_shortened(model, folder, layers=1)
    return (*WORKER, f"--speculate={request.param}", f"--draft-model={folder}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_workers(speculating: tuple[str, ...]) -> AsyncIterator[Fleet]:
    async with running_fleet(
        workers=2, worker_command=speculating, scheduler_flags=CHECKED
    ) as fleet:
        yield fleet


async def test_answers_equal_those_without_drafts(
    two_workers: Fleet,
    asked: list[Question],
    plain_answers: list[Answer],
    speculating: tuple[str, ...],
) -> None:
    got = await undisturbed(two_workers, asked, CLIENTS)
    check_answers(two_workers, asked, got, plain_answers, tolerance=1e-4)
    least = {"suffix": 100, "prediction": 50, "grammar": 5}
    if speculating != SUFFIX:
        # It precedes the suffix drafter where it is right more often.
        least = {"draft_model": 5, "prediction": 50, "grammar": 5}
        if "--speculate=eagle" in speculating:  # random weights are right by chance
            least["draft_model"] = 0
    for drafter, most in least.items():
        right = re.escape(f'_drafts_total{{drafter="{drafter}",outcome="accepted"}}')
        workers = two_workers.names("worker")
        count = sum(two_workers.metric(name, f"pagewire_worker{right}") for name in workers)
        assert count > most
        # A scheduler counts the reports of its workers.
        schedulers = two_workers.names("scheduler")
        name = f"pagewire_scheduler{right}"
        assert sum(two_workers.metric(each, name) for each in schedulers) == count


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
async def test_answers_equal_those_without_drafts_when_a_process_is_killed(
    two_workers: Fleet, asked: list[Question], plain_answers: list[Answer], victim: str
) -> None:
    await run_with_fault(two_workers, asked, plain_answers, victim, signal.SIGKILL)


async def test_answers_equal_those_without_drafts_after_preemptions(
    asked: list[Question], plain_answers: list[Answer], speculating: tuple[str, ...]
) -> None:
    async with running_fleet(
        workers=1, worker_command=(*speculating, FEW_BLOCKS), scheduler_flags=CHECKED
    ) as fleet:
        got = await undisturbed(fleet, asked, CLIENTS)
        check_answers(fleet, asked, got, plain_answers, tolerance=1e-4)
        assert fleet.metric("scheduler-0", "pagewire_scheduler_preemptions_total") > 0
