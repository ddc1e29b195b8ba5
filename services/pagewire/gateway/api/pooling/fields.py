"""The request fields that embeddings, scores and reranking share, and the job of such a request."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from pagewire.gateway.api.fields import GivenId, Int32
from pagewire.gateway.api.formatting import PooledForm
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.strict import Strict
from pagewire.gateway.generation.common_fields import CommonFields
from pagewire.limits import MAX_NAME_LENGTH
from pagewire.v1 import inference_pb2 as pb

MAX_INPUTS = 2048  # of a request, as in OpenAI's API


class PooledFields(Strict):
    """The fields beside inputs and results. null means that a field is absent."""

    model: str | None = None
    request_id: GivenId | None = None
    priority: Int32 | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None

    def pooled_job(
        self,
        model: str,
        form: PooledForm,
        params: pb.PoolingParams,
        inputs: Sequence[dict[str, Any]],
        input_field: str,
    ) -> Job:
        """One request for each input; `inputs` are fields of a GenerateRequest."""
        salt = self.cache_salt or ""
        return Job(
            requests=[
                pb.GenerateRequest(
                    request_id=f"{form.envelope.id}-{index}",
                    model=model,
                    stop=pb.StopConditions(max_tokens=0),
                    pooling=params,
                    priority=self.priority or 0,
                    deadline_ms=self.deadline_ms,
                )
                for index in range(len(inputs))
            ],
            common=[
                CommonFields.of(b"", pb.GenerateRequest(model=model, cache_salt=salt, **each))
                for each in inputs
            ],
            candidates=1,
            n=1,
            formatter=form,
            stream=False,
            include_usage=False,
            shows_logprobs=False,
            request_id=self.request_id,
            input_field=input_field,
        )
