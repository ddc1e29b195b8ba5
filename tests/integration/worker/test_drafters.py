"""Sources of drafts: predictions, recent outputs, grammars. None of them changes a token."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pagewire.models import resolve_model
from pagewire.v1 import worker_pb2 as pb
from support.models.constrained_sequences import EOS
from support.models.step_driver import Sequence, StepDriver, local_worker

FOLDER = resolve_model("embedded")
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
LENGTH = 90
WAYS = [
    pb.SlotSampling(top_p=1),
    pb.SlotSampling(top_p=1, temperature=1, seed=5, logprobs=2),
    pb.SlotSampling(top_p=0.9, temperature=0.8, seed=6, frequency_penalty=0.4),
]


def asked(text: str, way: pb.SlotSampling = WAYS[0], **more: Any) -> Sequence:
    """A question to the model, which answers with a story."""
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return Sequence(TOKENIZER.encode(chat).ids, LENGTH, sampling=way, **more)


def edited(tokens: list[int]) -> list[int]:
    """The tokens with one replaced, some left out and some inserted."""
    return [*tokens[:12], 7, *tokens[13:30], *tokens[36:60], 8, 9, *tokens[60:]]


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "sampled", "penalized"])
@pytest.mark.parametrize("run_ahead", [1, 3])
async def test_a_prediction_changes_how_many_steps_it_takes_and_nothing_else(
    way: pb.SlotSampling, run_ahead: int
) -> None:
    story = "Tell me a story about a fox."
    async with local_worker(FOLDER, speculate="none") as plain:
        driver = StepDriver(plain.stream(), plain.limits)
        sequence = asked(story, way)
        (want,) = await driver.run([sequence], run_ahead=run_ahead)
        steps = driver.number
        # A worker without speculation accepts a prediction, too.
        hinted = asked(story, way, prediction=want)
        assert await driver.run([hinted]) == [want]
        assert not driver.drafts
    async with local_worker(FOLDER, speculate="suffix") as worker:
        for prediction, right, most in (
            (want, 65, 0.3),
            (edited(want), 45, 0.55),
            (want[::-1], 0, 1.1),
            ([3] * 2000, 0, 1.1),
        ):
            driver = StepDriver(worker.stream(), worker.limits)
            guided = asked(story, way, prediction=prediction)
            assert await driver.run([guided], run_ahead=run_ahead) == [want]
            assert driver.accepted[pb.DRAFTER_PREDICTION] >= right
            if run_ahead == 1:
                assert driver.number <= most * steps + 2
            for one, other in zip(guided.logprobs, sequence.logprobs, strict=True):
                assert one[1] == other[1]
                assert one[2] == pytest.approx(other[2], abs=2e-5)


async def test_a_continuation_goes_on_in_its_prediction() -> None:
    async with local_worker(FOLDER, speculate="suffix") as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        whole = asked("Tell me about the moon.", WAYS[1])
        (want,) = await driver.run([whole])
        for known in (1, 15, 50):
            rest = asked("Tell me about the moon.", WAYS[1], prediction=want, generated=known)
            rest.tokens, rest.wanted = rest.tokens + want[:known], LENGTH - known
            before, steps = driver.accepted[pb.DRAFTER_PREDICTION], driver.number
            assert await driver.run([rest]) == [want[known:]]
            assert driver.accepted[pb.DRAFTER_PREDICTION] - before >= 0.8 * (LENGTH - known) - 8
            assert driver.number - steps <= (LENGTH - known) / 4 + 4


async def test_recent_outputs_of_the_same_salt_are_drafts_and_of_no_other() -> None:
    async with local_worker(FOLDER, speculate="suffix") as worker:
        driver = StepDriver(worker.stream(), worker.limits)

        async def drafted(salt: str) -> int:
            before = driver.drafts[pb.DRAFTER_RECENT]
            (output,) = await driver.run([asked("Tell me a story.", WAYS[1], salt=salt)])
            outputs.append(output)
            return driver.drafts[pb.DRAFTER_RECENT] - before

        outputs: list[list[int]] = []
        assert await drafted("one tenant") < 5  # a story may repeat four of its own tokens
        assert await drafted("another") < 5
        assert await drafted("") < 5
        right = driver.accepted[pb.DRAFTER_RECENT]
        assert await drafted("one tenant") > 50
        assert driver.accepted[pb.DRAFTER_RECENT] - right > 50
        assert await drafted("") > 50
        assert all(output == outputs[0] for output in outputs)


async def test_a_new_stream_of_steps_knows_no_outputs() -> None:
    async with local_worker(FOLDER, speculate="suffix") as worker:
        for _ in range(2):
            driver = StepDriver(worker.stream(), worker.limits)
            await driver.run([asked("Tell me a story.", WAYS[1])])
            assert driver.drafts[pb.DRAFTER_RECENT] < 5


SCHEMA = {
    "type": "object",
    "properties": {
        "first_name_of_the_person": {"type": "string", "maxLength": 8},
        "number_of_apples_in_the_basket": {"type": "integer"},
        "place_where_the_person_lives": {"enum": ["garden", "kitchen"]},
    },
    "required": [
        "first_name_of_the_person",
        "number_of_apples_in_the_basket",
        "place_where_the_person_lives",
    ],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1])
async def test_the_text_that_a_grammar_forces_is_drafted(temperature: float) -> None:
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(SCHEMA), defaults={"whitespace_flexible": False}
    )
    outputs, steps = [], []
    for speculate in ("none", "suffix"):
        async with local_worker(FOLDER, speculate=speculate) as worker:
            driver = StepDriver(worker.stream(), worker.limits)
            way = pb.SlotSampling(top_p=1, temperature=temperature, seed=3)
            ran = asked("Who are you?", way)
            ran.constraint = pb.Constraint(grammar=grammar, end_token_ids=EOS)
            outputs += await driver.run([ran], run_ahead=2)
            assert not ran.failure
            ended = outputs[-1].index(EOS[0]) if EOS[0] in outputs[-1] else LENGTH
            outputs[-1] = outputs[-1][:ended]
            steps.append(driver.number)
    assert outputs[0] == outputs[1]
    assert SCHEMA["required"][0] in TOKENIZER.decode(outputs[1])
    assert driver.accepted[pb.DRAFTER_GRAMMAR] > 20
    assert worker.engine.metrics.drafts.value("grammar", "accepted") > 20
    assert not worker.fatal


async def test_a_prediction_outside_the_vocabulary_fails_alone() -> None:
    async with local_worker(FOLDER, speculate="suffix") as worker:
        driver = StepDriver(worker.stream(), worker.limits)
        wrong = asked("Who are you?", prediction=[5, 5000])
        fine = asked("Who are you?")
        await driver.run([wrong, fine])
        assert "5000 of the prediction is not in the vocabulary of 4096" in wrong.failure
        assert not fine.failure
