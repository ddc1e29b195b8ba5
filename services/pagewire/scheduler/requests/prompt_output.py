"""A prompt's text and log probabilities: from a worker's result to the client's message."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pagewire.errors import invalid
from pagewire.packing import Int32Array, pack, pack_floats, unpack, unpack_floats
from pagewire.scheduler.core.prompt_logprobs import PromptLogprobs, ScoredTokens
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2 as worker_pb


@dataclass(frozen=True, slots=True)
class AwaitedPrompt:
    """The prompt output that is known before the prompt is computed."""

    text: str  # empty unless the request wants it
    has_bytes: bool  # whether tokens come with their bytes


def read_scored(message: worker_pb.PromptLogprobs) -> Iterator[tuple[int, ScoredTokens]]:
    """Slots and their tokens; ValueError if the arrays do not fit each other."""
    counts = unpack(message.counts)
    if not len(counts) or counts.min() < 1:
        raise ValueError("log probabilities of a prompt without tokens")
    rows = int(counts.sum(dtype=np.int64))
    logprobs, ranks = unpack_floats(message.logprobs), unpack(message.ranks)
    if len(logprobs) != rows or len(ranks) != rows:
        raise ValueError(
            f"{len(logprobs)} log probabilities and {len(ranks)} ranks of {rows} tokens"
        )
    ids = unpack(message.top_ids).reshape(rows, -1)
    values = unpack_floats(message.top_logprobs).reshape(ids.shape)
    ends = np.cumsum(counts).tolist()
    named = zip(unpack(message.slots), unpack(message.begins), counts.tolist(), ends, strict=True)
    for slot, begin, count, end in named:
        at = slice(end - count, end)
        yield int(slot), ScoredTokens(int(begin), logprobs[at], ranks[at], ids[at], values[at])


def prompt_output(
    prompt: Int32Array,
    awaited: AwaitedPrompt,
    logprobs: PromptLogprobs | None,
    token_bytes: Callable[[int], bytes],
) -> pb.PromptOutput:
    """The message for a client, without its stream number; `logprobs` are complete."""
    message = pb.PromptOutput(text=awaited.text, token_ids=pack(prompt))
    if logprobs is None:
        return message
    scored = logprobs.joined()
    message.logprobs = pack_floats(scored.logprobs)
    message.ranks = pack(scored.ranks)
    message.top_token_ids = pack(scored.top_ids)
    message.top_logprobs = pack_floats(scored.top_logprobs)
    if awaited.has_bytes:
        # By a table over the vocabulary: sorting half a million ids would take ten times as long.
        there = np.zeros(1 + max(int(prompt.max()), int(scored.top_ids.max(initial=0))), np.bool_)
        there[prompt] = there[scored.top_ids.ravel()] = True
        distinct = np.flatnonzero(there)
        pieces = [*map(token_bytes, distinct.tolist())]
        message.distinct_ids = pack(distinct)
        message.distinct_sizes.extend(map(len, pieces))
        message.distinct_bytes = b"".join(pieces)
    return message


def check_prompt_size(num_prompt: int, num_top: int | None, most: int) -> None:
    """INVALID_ARGUMENT for a prompt that would have more than `most` log probabilities."""
    if num_top is None:
        return
    count = (num_prompt - 1) * (num_top + 1)
    if count > most:
        raise invalid(
            "prompt_logprobs",
            f"a prompt of {num_prompt} tokens has {count} log probabilities with {num_top} of the "
            f"likeliest tokens at each place; at most {most} are given (max_prompt_logprobs): "
            "shorten the prompt, or lower prompt_logprobs or, with echo, logprobs",
        )
