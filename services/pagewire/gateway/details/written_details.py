"""Token ids and token counts, added to the JSON that other packages write."""

import json
from array import array
from collections.abc import Sequence

from pagewire.gateway.details.details import Details
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.generation.prompt_log import PromptLog

# Formatting this many ids takes about a millisecond.
_IDS_A_PIECE = 8192
# This text cannot be part of a string in the JSON, where quotes are escaped.
_EVENT = "data: {"
_CHOICES = '"choices":[{'


async def ids_json(name: str, ids: "Sequence[int] | array[int]", pacer: Pacer) -> list[str]:
    """The pieces of `"name":[1,2],`."""
    pieces = [f'"{name}":[']
    for begin in range(0, len(ids), _IDS_A_PIECE):
        text = ",".join(map(str, ids[begin : begin + _IDS_A_PIECE]))
        pieces.append(f",{text}" if begin else text)
        await pacer.pause_if_due()
    return [*pieces, "],"]


class DetailedEvents:
    """Adds the details to the events of a streamed answer."""

    def __init__(self, details: Details) -> None:
        self._details = details
        self._num_shown: dict[int, int] = {}  # tokens shown so far, by index of the generation

    async def add_to(self, written: list[str], generation: Generation, pacer: Pacer) -> list[str]:
        """The pieces of the events that were `written` for a generation, with their details.

        The first event of a generation has its prompt, the last one of each call its new tokens.
        """
        if not any(written):
            return []
        index, details = generation.index, self._details
        is_first = index not in self._num_shown
        shown = self._num_shown.setdefault(index, 0)
        # `generation.tokens` may grow during a pause.
        tokens = generation.tokens[shown:]
        events = "".join(written).removesuffix("\n\n").split("\n\n")
        pieces: list[str] = []
        for number, event in enumerate(events):
            head, found, choice = event.removeprefix(_EVENT).partition(_CHOICES)
            assert found, "an event of a generation has a choice"
            beside: list[str] = []
            within: list[str] = []
            if details.usage:
                counts = json.dumps(_usage(generation, shown + len(tokens)))
                beside.append(f'"usage":{counts},')
            if details.token_ids and is_first and number == 0:
                prompt = await ids_json("prompt_token_ids", _prompt_ids(generation.prompt), pacer)
                (within if details.prompt_in_choice else beside).extend(prompt)
            if details.token_ids and number == len(events) - 1:
                within += await ids_json("token_ids", tokens, pacer)
                self._num_shown[index] = shown + len(tokens)
            pieces += [_EVENT, *beside, head, _CHOICES, *within, choice, "\n\n"]
        return pieces


async def detailed_choice(
    details: Details,
    written: list[str],
    tokens: "Sequence[int] | array[int]",
    prompt: PromptLog | None,
    pacer: Pacer,
) -> list[str]:
    """The pieces of a whole choice, `written` as a JSON object, with its details."""
    if not details.token_ids:
        return written
    within = await ids_json("token_ids", tokens, pacer)
    if details.prompt_in_choice:
        within += await ids_json("prompt_token_ids", _prompt_ids(prompt), pacer)
    return ["{", *within, written[0].removeprefix("{"), *written[1:]]


async def details_beside_choices(
    details: Details, generation: Generation, pacer: Pacer
) -> list[str]:
    """The pieces of a whole answer's members beside its choices."""
    if not details.token_ids or details.prompt_in_choice:
        return []
    return await ids_json("prompt_token_ids", _prompt_ids(generation.prompt), pacer)


def _prompt_ids(prompt: PromptLog | None) -> list[int]:
    assert prompt is not None, "a request that wants token ids wishes them of its prompt"
    return prompt.token_ids


def _usage(generation: Generation, num_tokens: int) -> dict[str, int]:
    """The token counts of one choice so far."""
    prompt = generation.prompt_tokens
    if generation.finish is not None:
        prompt = generation.finish.usage.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": num_tokens,
        "total_tokens": prompt + num_tokens,
    }
