"""Workers with the embedded model and torch operations in float32, and requests for them."""

from typing import Any

from pagewire.models import EMBEDDED_NAME
from support.clients.load import Question

WORKER = (
    "worker",
    "--ops=torch",
    "--device=cpu",
    "--dtype=float32",
    "--torch-threads=1",
    "--num-blocks=400",
    "--num-slots=16",
)
CLIENTS = 6
PROMPTS = [
    "Once upon a time there was a fox",
    "One day, a small bird flew over the",
    "The old man said:",
    "What is seven plus five? It is",
    "Count: one, two, three,",
    "The opposite of hot is",
]


def questions(count: int) -> list[Question]:
    """Greedy and sampled requests, some with log probabilities, penalties or stop strings."""
    made = []
    for number in range(count):
        body: dict[str, Any] = {
            "model": EMBEDDED_NAME,
            "prompt": PROMPTS[number % len(PROMPTS)],
            "max_tokens": 60 + 10 * (number % 5),
            "ignore_eos": True,
            "temperature": 0 if number % 2 else 0.9,
            "seed": number,
            "stream": number % 4 != 3,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if number % 3 == 0:
            body["logprobs"] = 3
        if number % 4 > 1:
            body |= {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
            body["logit_bias"] = {str(number): 2.0}
        if number % 5 == 0:
            body["stop"] = ["the end", "\n\n"]
        made.append(Question("/v1/completions", body))
    return made
