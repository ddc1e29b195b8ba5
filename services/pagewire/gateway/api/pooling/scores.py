"""/v1/score and /v1/rerank: the fields of requests for scores of pairs, and their answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Discriminator, Field, Tag

from pagewire.errors import invalid
from pagewire.gateway.api.fields import Count, string_or_array
from pagewire.gateway.api.formatting import Envelope, PooledForm, json_utf8
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.pooling.fields import MAX_INPUTS, PooledFields
from pagewire.gateway.api.strict import Strict
from pagewire.gateway.api.unsupported import POOLING_HINTS, RERANK, SCORE
from pagewire.packing import Float32Array
from pagewire.v1 import inference_pb2 as pb

# The same endpoints under the names of vLLM, Jina and Cohere.
SCORE_PATH, RERANK_PATH = "/v1/score", "/v1/rerank"
SCORE_PATHS = (SCORE_PATH, "/score")
RERANK_PATHS = (RERANK_PATH, "/rerank", "/v2/rerank")

_PARAMS = pb.PoolingParams(task=pb.POOLING_TASK_SCORE)


def _texts(field: str) -> Any:
    return Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("<strings>")],
        string_or_array(field, "<strings>", "strings"),
    ]


class ScoreFields(PooledFields):
    """The fields of both endpoints."""

    hints = POOLING_HINTS

    instruction: str | None = None

    def score_job(
        self, model: str, form: PooledForm, pairs: Sequence[tuple[str, str]], field: str
    ) -> Job:
        """One request for each pair of a query and a document."""
        inputs = [
            {"pair": pb.TextPair(query=query, document=document, instruction=self.instruction)}
            for query, document in pairs
        ]
        return self.pooled_job(model, form, _PARAMS, inputs, field)


class ScoreRequest(ScoreFields):
    """The body of a request to /v1/score: each text_2 is scored with its text_1."""

    refused = SCORE

    text_1: _texts("text_1")  # type: ignore[valid-type]
    text_2: _texts("text_2")  # type: ignore[valid-type]

    def job(self, model: str, max_model_len: int) -> Job:
        """The requests for the schedulers; RequestError names a field that is not valid."""
        form = ScoreForm(Envelope("score", "list", model))
        return self.score_job(model, form, pairs_of(self.text_1, self.text_2), "text_2")


class Document(Strict):
    """A document as an object."""

    text: str


def _document_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<string>"
    return "<object>" if isinstance(value, dict | Document) else None


AnyDocument = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[Document, Tag("<object>")],
    Discriminator(
        _document_kind,
        custom_error_type="document",
        custom_error_message="it must be a string or an object with a text",
    ),
]


class RerankRequest(ScoreFields):
    """The body of a request to /v1/rerank: the documents are ordered by their scores."""

    refused = RERANK

    query: str
    documents: Annotated[list[AnyDocument], Field(fail_fast=True, max_length=MAX_INPUTS)]
    top_n: Count | None = None
    return_documents: bool | None = None

    def job(self, model: str, max_model_len: int) -> Job:
        """The requests for the schedulers; RequestError names a field that is not valid."""
        texts = [each.text if isinstance(each, Document) else each for each in self.documents]
        if not texts:
            raise invalid("documents", "documents is empty; give at least one document")
        returned = self.return_documents is None or self.return_documents
        form = RerankForm(
            Envelope("rerank", "list", model),
            self.top_n or len(texts),
            tuple(texts) if returned else None,
        )
        return self.score_job(model, form, [(self.query, text) for text in texts], "documents")


def pairs_of(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of queries and documents; a single query applies to all documents. RequestError if
    the numbers of texts do not match."""
    queries, documents = _listed("text_1", text_1), _listed("text_2", text_2)
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        raise invalid(
            "text_1",
            f"text_1 has {len(queries)} texts and text_2 {len(documents)}; give one text_1, or one "
            "for each text_2",
        )
    return list(zip(queries, documents, strict=True))


def _listed(field: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise invalid(field, f"{field} is empty; give at least one text")
    return texts


@dataclass(frozen=True, slots=True)
class ScoreForm(PooledForm):
    """Scores in the order of the pairs, in vLLM's form."""

    def entries(self, vectors: Sequence[Float32Array]) -> Iterator[str]:
        """See `PooledForm`."""
        for index, vector in enumerate(vectors):
            yield json_utf8({"index": index, "object": "score", "score": float(vector[0])})


@dataclass(frozen=True, slots=True)
class RerankForm(PooledForm):
    """The best `top_n` documents, the best one first; equal scores keep the request's order.

    `documents` is None if the answer has no texts.
    """

    results_field: ClassVar[str] = "results"

    top_n: int
    documents: tuple[str, ...] | None

    def entries(self, vectors: Sequence[Float32Array]) -> Iterator[str]:
        """See `PooledForm`."""
        scores = np.concatenate(vectors)
        for index in np.argsort(-scores, kind="stable")[: self.top_n].tolist():
            result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            if self.documents is not None:
                result["document"] = {"text": self.documents[index]}
            yield json_utf8(result)

    def fields(self, usage: dict[str, Any]) -> dict[str, Any]:
        """See `PooledForm`."""
        return {
            "id": self.envelope.id,
            "model": self.envelope.model,
            "usage": usage,
            self.results_field: None,
        }
