"""From a scheduler's message to its generations. This is the gateway's hot path."""

import time
from collections.abc import Mapping
from itertools import repeat
from typing import NamedTuple

from pagewire.errors import RequestError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.logprob_log import CandidateReader
from pagewire.gateway.metrics import ModelMetrics
from pagewire.packing import unpack_unsigned
from pagewire.v1 import inference_pb2 as pb


class MisplacedDelta(NamedTuple):
    """`num_tokens` tokens from `begin` on, which do not follow the generation's tokens."""

    stream: int
    generation: Generation
    begin: int
    num_tokens: int


def deliver_prompts(
    response: pb.MultiplexResponse, generations: Mapping[int, Generation], metrics: ModelMetrics
) -> list[tuple[Generation, RequestError]]:
    """Passes prompt data to the generations that ask for it; it arrives before their first tokens.

    `metrics` belong to the scheduler's model. Returns the generations whose answers would be too
    large, with the reason.
    """
    refused = []
    for output in response.prompts:
        generation = generations.get(output.stream)
        if generation is None or generation.aborted:
            continue
        if output.logprobs and not generation.prompt_tokens:  # text arrives before it is computed
            generation.prompt_tokens = len(output.token_ids) // 4
            metrics.prompt_tokens.inc(generation.prompt_tokens)
        try:
            generation.receive_prompt(output)
        except RequestError as error:
            refused.append((generation, error))
    return refused


def deliver(
    response: pb.MultiplexResponse, generations: Mapping[int, Generation], metrics: ModelMetrics
) -> list[MisplacedDelta]:
    """Adds tokens, text and log probabilities to each generation; `generations` is by stream.

    `metrics` belong to the scheduler's model. Returns the deltas that were not delivered because
    tokens are missing or repeated.
    """
    now = time.perf_counter()
    misplaced = []
    all_tokens, all_text = response.token_ids, response.text
    streams = unpack_unsigned(response.streams).tolist()
    candidates = CandidateReader(response) if response.candidate_counts else None
    token_at = text_at = 0
    for stream, index, count, size, prompt_tokens, width in zip(
        streams,
        unpack_unsigned(response.indices).tolist(),
        response.token_counts or repeat(1, len(streams)),
        unpack_unsigned(response.text_sizes).tolist(),
        response.prompt_tokens or repeat(0, len(streams)),
        response.candidate_counts or repeat(0, len(streams)),
        strict=True,
    ):
        tokens = all_tokens[token_at : token_at + 4 * count]
        text = all_text[text_at : text_at + size]
        token_at += 4 * count
        text_at += size
        logprobs = candidates.take(count, width) if candidates and width else None
        generation = generations.get(stream)
        if generation is None or generation.aborted:
            continue
        if prompt_tokens and not generation.prompt_tokens:
            generation.prompt_tokens = prompt_tokens
            metrics.prompt_tokens.inc(prompt_tokens)
        if index == len(generation.tokens):
            if logprobs and generation.logprobs is not None:
                generation.logprobs.extend(logprobs)
            generation.extend(tokens, text, now)
        else:
            misplaced.append(MisplacedDelta(stream, generation, index, count))
    metrics.generated_tokens.inc(len(all_tokens) // 4)
    return misplaced
