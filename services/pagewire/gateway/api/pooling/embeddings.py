"""/v1/embeddings: the fields of a request, and the form of its answer."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, Tag

from pagewire.context_length import context_length_exceeded
from pagewire.errors import invalid, quoted
from pagewire.gateway.api.fields import Int32, Tokens, keeps_start, one_or_more_inputs
from pagewire.gateway.api.formatting import Envelope, PooledForm, json_utf8
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.pooling.fields import MAX_INPUTS, PooledFields
from pagewire.gateway.api.unsupported import EMBEDDING, POOLING_HINTS
from pagewire.limits import INT32_MAX
from pagewire.packing import Float32Array, pack_floats
from pagewire.v1 import inference_pb2 as pb

PATH = "/v1/embeddings"

Input = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("<strings>")]
    | Annotated[Tokens, Tag("<token ids>")]
    | Annotated[
        list[Tokens], Field(fail_fast=True, max_length=MAX_INPUTS), Tag("<lists of token ids>")
    ],
    one_or_more_inputs("input"),
]


class EmbeddingRequest(PooledFields):
    """The body of a request."""

    hints = POOLING_HINTS
    refused = EMBEDDING

    input: Input
    encoding_format: str | None = None
    dimensions: Int32 | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    truncation_side: str | None = None

    def job(self, model: str, max_model_len: int) -> Job:
        """The requests for the schedulers; RequestError names a field that is not valid."""
        if self.encoding_format not in (None, "float", "base64"):
            raise invalid(
                "encoding_format",
                f"encoding_format is {quoted(self.encoding_format)}; it must be float or base64",
            )
        if self.dimensions is not None and self.dimensions < 1:
            raise invalid("dimensions", f"dimensions is {self.dimensions}; it must be at least 1")
        kept = self._kept_tokens(max_model_len)
        from_start = keeps_start(self.truncation_side, kept)
        options = {
            "add_special_tokens": self.add_special_tokens,
            "truncate_prompt_tokens": kept,
            "keep_prompt_start": from_start,
        }
        inputs = []
        for index, text in enumerate(self._inputs()):
            if text == []:  # the scheduler judges an empty text by its special tokens
                raise invalid("input", f"input at index {index} is empty; give at least one token")
            if isinstance(text, list):
                if kept is not None:
                    text = text[:kept] if from_start else text[-kept:]
                inputs.append({**options, **_token_input(text, index, max_model_len)})
            else:
                inputs.append({**options, "prompt": text})
        return self.pooled_job(
            model,
            EmbeddingForm(Envelope("embd", "list", model), self.encoding_format == "base64"),
            pb.PoolingParams(task=pb.POOLING_TASK_EMBED, dimensions=self.dimensions),
            inputs,
            "input",
        )

    def _inputs(self) -> list[Any]:
        given: Any = self.input
        single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        inputs: list[Any] = [given] if single else list(given)
        if not inputs:
            raise invalid("input", "input is empty; give at least one text")
        return inputs

    def _kept_tokens(self, max_model_len: int) -> int | None:
        """The maximum number of tokens to keep of an input; None keeps all."""
        if self.truncate_prompt_tokens == 0:
            raise invalid(
                "truncate_prompt_tokens",
                "truncate_prompt_tokens is 0; it must be at least 1, or -1 for all that fit",
            )
        return max_model_len if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


def _token_input(tokens: list[int], index: int, max_model_len: int) -> dict[str, Any]:
    if len(tokens) > max_model_len:
        raise context_length_exceeded(
            f"{max_model_len} tokens", len(tokens), 0, part=f"input at index {index}", field="input"
        )
    return {"prompt_token_ids": pb.TokenIds(ids=tokens)}


@dataclass(frozen=True, slots=True)
class EmbeddingForm(PooledForm):
    """Embeddings as arrays of numbers, or as base64 of little-endian float32."""

    base64: bool = False

    def entries(self, vectors: Sequence[Float32Array]) -> Iterator[str]:
        """See `PooledForm`."""
        for index, vector in enumerate(vectors):
            embedding: Any = vector.tolist()
            if self.base64:
                embedding = base64.b64encode(pack_floats(vector)).decode()
            yield json_utf8({"object": "embedding", "index": index, "embedding": embedding})
