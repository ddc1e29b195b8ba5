"""Embeddings and scores: from a caller's input to jobs, and from vectors to outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.errors import RequestError, invalid
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.pooling.embeddings import EmbeddingRequest
from pagewire.gateway.api.pooling.scores import ScoreRequest, pairs_of
from pagewire.gateway.api.validation import validate_object
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.parsing.unknown_fields import check_extras
from pagewire.llm.params import encodable_texts, suggestion
from pagewire.llm.prompts import PromptLike, listed, numbered, prompt_of
from pagewire.packing import unpack_floats
from pagewire.v1 import inference_pb2 as pb

Request = EmbeddingRequest | ScoreRequest
# Fields of a body that a call does not accept by name.
_NOT_FOR_CALLS = {"model", "request_id", "input", "encoding_format", "text_1", "text_2"}


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one input. If it failed, it is empty and `error` has the reason."""

    embedding: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The score of one pair. If it failed, it is None and `error` has the reason."""

    score: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    error: RequestError | None = None


def embedding_jobs(
    inputs: Sequence[PromptLike], fields: Mapping[str, Any], model: pb.Model
) -> list[Job]:
    """One job for each input; RequestError names the first invalid input."""
    _check_names(EmbeddingRequest, fields)
    jobs = []
    for index, given in enumerate(inputs):
        try:
            prompt = prompt_of(given)
            body = {"input": prompt.text if prompt.token_ids is None else prompt.token_ids}
            jobs.append(_job(EmbeddingRequest, {**body, **fields}, model))
        except RequestError as error:
            raise numbered(error, index, len(inputs)) from None
    return jobs


def score_jobs(
    text_1: str | Sequence[str],
    text_2: str | Sequence[str],
    fields: Mapping[str, Any],
    model: pb.Model,
) -> list[Job]:
    """One job for each pair, as /v1/score makes them; RequestError names what is not valid."""
    _check_names(ScoreRequest, fields)
    pairs, jobs = pairs_of(_texts(text_1, "text_1"), _texts(text_2, "text_2")), []
    for index, (one, other) in enumerate(pairs):
        try:
            jobs.append(_job(ScoreRequest, {"text_1": one, "text_2": other, **fields}, model))
        except RequestError as error:
            raise numbered(error, index, len(pairs)) from None
    return jobs


def embedding_output(
    generations: Sequence[Generation], failure: RequestError | None
) -> EmbeddingOutput:
    """The output of a job that has ended."""
    values, prompt, cached = _result(generations, failure)
    return EmbeddingOutput(values, prompt, cached, failure)


def score_output(generations: Sequence[Generation], failure: RequestError | None) -> ScoreOutput:
    """The output of a job that has ended."""
    values, prompt, cached = _result(generations, failure)
    return ScoreOutput(values[0] if values else None, prompt, cached, failure)


def _result(
    generations: Sequence[Generation], failure: RequestError | None
) -> tuple[list[float], int, int]:
    [generation] = generations
    if failure is not None:
        return [], generation.used_prompt_tokens, 0
    assert generation.finish is not None
    usage = generation.finish.usage
    values = unpack_floats(generation.finish.pooled).tolist()
    return values, usage.prompt_tokens, usage.cached_tokens


def _job(kind: type[Request], body: dict[str, Any], model: pb.Model) -> Job:
    request = validate_object(kind, body)
    check_extras(request, refuse_unknown=True)
    with encodable_texts():
        return request.job(model.id, model.max_model_len)


def _texts(given: str | Sequence[str], name: str) -> str | list[str]:
    return given if isinstance(given, str) else listed(given, name, "a text or a list of texts")


def _check_names(kind: type[Request], fields: Mapping[str, Any]) -> None:
    known = kind.model_fields.keys() - _NOT_FOR_CALLS
    for name in fields:
        if name not in known:
            raise invalid(name, f"{name} is not a parameter of this call{suggestion(name, known)}")
