"""A model that is called like a function."""

import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import grpc
from google.protobuf.message import Message

from pagewire.errors import Code, RequestError, invalid
from pagewire.gateway.api.job import Job
from pagewire.gateway.api.limits import BodyLimits
from pagewire.llm.batch import Batch, JobFailedError, Report
from pagewire.llm.outputs import RequestOutput, failed_output, whole_output
from pagewire.llm.pooled import (
    EmbeddingOutput,
    ScoreOutput,
    embedding_jobs,
    embedding_output,
    score_jobs,
    score_output,
)
from pagewire.llm.private_stack import Connected, PrivateStack
from pagewire.llm.progress import progress_bar
from pagewire.llm.prompts import (
    Conversation,
    ParamsLike,
    PromptLike,
    Task,
    chat_task,
    completion_task,
    list_conversations,
    list_prompts,
    numbered,
    tasks_of,
)
from pagewire.llm.stack_settings import stack_values
from pagewire.llm.token_calls import detokenize_request, tokenize_request
from pagewire.rpc.interceptors import FIELD_TRAILER
from pagewire.v1 import inference_pb2 as pb

OnError = Literal["raise", "return"]
ON_ERROR = get_args(OnError)
Answer = TypeVar("Answer")


class LLM:
    """A model in processes of its own: workers and a scheduler, which end with this object.

    A process that is killed is started again, and its requests continue with the tokens that they
    have. Several threads may call methods at once, also beside a running event loop.
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        """Starts the processes and waits until they are ready.

        `model` is a folder or any other value of `pagewire run --model`; the default is the small
        chat model that comes with Pagewire. `settings` are those of `pagewire run` for workers and
        scheduler, such as `workers`, `max_model_len` or `gpu_memory_utilization`. TypeError names
        an unknown setting, ValueError an invalid value; RuntimeError says why a process did not
        start.
        """
        self._stack = PrivateStack(stack_values(model, settings))
        # Ends the processes when this object is collected, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._stack.close)
        try:
            self._stack.connected()
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> pb.Model:
        """The model: its name in `id`, and limits such as `max_model_len`."""
        return self._stack.connected().schedulers.model(None)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: ParamsLike = None,
        *,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Continues prompts; returns their outputs in the same order.

        A prompt is a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`.
        `params` are for all prompts, or one for each; without `max_tokens` an output ends after 16
        tokens, as over HTTP. A progress bar is shown on a terminal; `progress` (also `use_tqdm`)
        forces or prevents it.

        Raises RequestError for the first prompt that is not valid or fails, and aborts the others.
        With `on_error="return"`, a prompt that fails while it runs has its error in
        `RequestOutput.error`, and no outputs.
        """
        listed = list_prompts(prompts)
        model = self.model
        tasks = tasks_of(listed, params, lambda prompt, each: completion_task(prompt, each, model))
        return self._run(tasks, use_tqdm if progress is None else progress, on_error)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: ParamsLike = None,
        *,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        on_error: OnError = "raise",
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several; see `generate`.

        Messages are those of the HTTP API. `fields` are further fields of a chat request, such as
        `chat_template_kwargs`. Without `max_tokens` an answer may be as long as the model allows.
        """
        listed = list_conversations(messages)
        model, limits = self.model, body_limits(self._stack.values)
        tasks = tasks_of(
            listed, params, lambda each, chosen: chat_task(each, chosen, fields, model, limits)
        )
        return self._run(tasks, use_tqdm if progress is None else progress, on_error)

    def embed(
        self,
        inputs: PromptLike | Sequence[PromptLike],
        *,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        on_error: OnError = "raise",
        **fields: Any,
    ) -> list[EmbeddingOutput]:
        """The embeddings of texts or token ids, in the same order; see `generate`.

        `fields` are those of /v1/embeddings, such as `dimensions`. The model must embed, as the
        setting `task` says.
        """
        jobs = embedding_jobs(list_prompts(inputs, "inputs"), fields, self.model)
        batch = self._run_jobs(jobs, use_tqdm if progress is None else progress, on_error)
        return [
            embedding_output(batch.generations[index], batch.failure_of(index))
            for index in range(len(jobs))
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        on_error: OnError = "raise",
        **fields: Any,
    ) -> list[ScoreOutput]:
        """The score of each `text_2` for `text_1`, or of the pairs of two lists; see `generate`.

        `fields` are those of /v1/score, such as `instruction`. The model must score, as the setting
        `task` says.
        """
        jobs = score_jobs(text_1, text_2, fields, self.model)
        batch = self._run_jobs(jobs, use_tqdm if progress is None else progress, on_error)
        return [
            score_output(batch.generations[index], batch.failure_of(index))
            for index in range(len(jobs))
        ]

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; RequestError says why there are none."""
        request = tokenize_request(text, add_special_tokens)
        connected = self._stack.connected()
        answer = self._stack.run(_unary(connected.stub.Tokenize, request, connected.metadata))
        return list(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; RequestError says why there is none."""
        request = detokenize_request(token_ids, skip_special_tokens, self.model.vocab_size)
        connected = self._stack.connected()
        answer = self._stack.run(_unary(connected.stub.Detokenize, request, connected.metadata))
        return str(answer.text)

    def close(self) -> None:
        """Ends the processes; open calls fail. Further calls of `close` do nothing."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, tasks: list[Task], progress: bool | None, on_error: OnError
    ) -> list[RequestOutput]:
        batch = self._run_jobs([task.job for task in tasks], progress, on_error)
        outputs = []
        for index, task in enumerate(tasks):
            generations = batch.generations[index]
            failure = batch.failure_of(index)
            if failure is not None:
                outputs.append(failed_output(task.prompt, generations, failure))
            else:
                outputs.append(whole_output(task.prompt, task.job, generations))
        return outputs

    def _run_jobs(self, jobs: list[Job], progress: bool | None, on_error: OnError) -> Batch:
        if on_error not in ON_ERROR:
            raise invalid("on_error", f"on_error is {on_error!r}; give {' or '.join(ON_ERROR)}")
        connected = self._stack.connected()
        if not jobs:
            return Batch(connected.schedulers, jobs, stop_at_failure=True)
        with progress_bar(len(jobs), progress) as report:
            try:
                return self._stack.run(_run(connected, jobs, on_error == "raise", report))
            except JobFailedError as failed:
                raise numbered(failed.failure, failed.index, len(jobs)) from None


def body_limits(values: Mapping[str, Any]) -> BodyLimits:
    """The bounds that a stack's settings put on a conversation."""
    return BodyLimits(
        max_messages=values["max_messages"],
        max_template_bytes=values["max_template_bytes"],
        max_template_nodes=values["max_template_nodes"],
    )


async def _run(
    connected: Connected, jobs: list[Job], stop_at_failure: bool, report: Report | None
) -> Batch:
    batch = Batch(connected.schedulers, jobs, stop_at_failure)
    await batch.run(report)
    return batch


async def _unary(call: Callable[..., Awaitable[Answer]], request: Message, metadata: Any) -> Answer:
    """The scheduler's answer; RequestError with the reason if the scheduler refuses the call."""
    try:
        return await call(request, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        code = error.code().value[0]
        known = code in Code._value2member_map_
        trailers = dict(error.trailing_metadata() or ())
        raise RequestError(
            Code(code) if known else Code.INTERNAL,
            error.details() or error.code().name,
            str(trailers.get(FIELD_TRAILER, "")),
        ) from None
