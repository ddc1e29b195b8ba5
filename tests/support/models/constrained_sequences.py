"""Sequences of the embedded model whose output is a small JSON object."""

import json
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLTokenizer

from pagewire.models import eos_token_ids, resolve_model
from pagewire.v1 import worker_pb2 as pb
from support.models.step_driver import Sequence

FOLDER = resolve_model("embedded")
EOS = eos_token_ids(FOLDER)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 22]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
STEPS = 32  # more than any output needs


def constrained(seed: int, output: list[int] | None = None, **sampling: Any) -> Sequence:
    """A sequence that may already have an `output`."""
    known = output or []
    return Sequence(
        [10 + seed, 20, 30, *known],
        STEPS - len(known),
        generated=len(known),
        sampling=pb.SlotSampling(temperature=1.2, top_p=1, seed=seed, **sampling),
        constraint=pb.Constraint(grammar=GRAMMAR, end_token_ids=EOS),
    )


def free(seed: int) -> Sequence:
    """A sequence without a constraint."""
    sampling = pb.SlotSampling(temperature=1, top_p=1, seed=seed)
    return Sequence([40 + seed, 5], STEPS, sampling=sampling)


def until_the_end(output: list[int]) -> list[int]:
    """The tokens before the end."""
    ends = [i for i, token in enumerate(output) if token in EOS]
    assert ends, "the grammar is complete long before"
    return output[: ends[0]]


def check_text(tokenizer: LLTokenizer, tokens: list[int]) -> None:
    """The text of `tokens` must be JSON of the schema."""
    jsonschema.validate(json.loads(tokenizer.decode_str(tokens)), SCHEMA)
