"""Turns a caller's prompts or conversations, with parameters, into jobs of the gateway."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pagewire.errors import RequestError, invalid
from pagewire.gateway.api.chat import ChatRequest
from pagewire.gateway.api.completions import CompletionRequest
from pagewire.gateway.api.job import Job, ask_for_prompt
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.api.validation import validate_object
from pagewire.gateway.generation.prompt_log import PromptWishes
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsing.unknown_fields import check_extras
from pagewire.llm.outputs import Prompt
from pagewire.llm.params import NAMES, SamplingParams, encodable_texts, suggestion
from pagewire.v1 import inference_pb2 as pb

# A text, token ids, or a mapping with one of them under `prompt` or `prompt_token_ids`.
PromptLike = str | Sequence[int] | Mapping[str, Any]
# Messages in the form of the HTTP API: `{"role": "user", "content": "Hello"}`.
Conversation = Sequence[Mapping[str, Any]]
ParamsLike = SamplingParams | Sequence[SamplingParams] | None

Item = TypeVar("Item")

# Fields of a chat request that a call does not accept by name, or that outputs have no place for.
_NOT_FOR_CHAT = {
    "messages",
    "model",
    "stream",
    "stream_options",
    "max_completion_tokens",
    "top_logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    *NAMES,
}


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with its requests, which form one job of the gateway."""

    prompt: Prompt
    job: Job


def list_prompts(
    prompts: PromptLike | Sequence[PromptLike], name: str = "prompts"
) -> list[PromptLike]:
    """The prompts of a call with one or several; RequestError for another type."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = listed(prompts, name, "a text, token ids, or a list of these")
    # Numbers are the token ids of one prompt.
    return [items] if items and isinstance(items[0], int) else items


def list_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """The conversations of a call with one or several; RequestError for another type."""
    items = listed(messages, "messages", "a list of messages, or a list of such lists")
    return [items] if items and isinstance(items[0], Mapping) else items


def listed(given: Any, name: str, wanted: str) -> list[Any]:
    """The items of a caller's list; RequestError says what is wanted instead of another type."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise invalid(name, f"{name} is of type {type(given).__name__}; give {wanted}")
    return list(given)


def tasks_of(
    items: Sequence[Item], params: ParamsLike, make: Callable[[Item, SamplingParams], Task]
) -> list[Task]:
    """The tasks of prompts or conversations, each with its parameters.

    RequestError names the first invalid one.
    """
    tasks = []
    for index, (item, chosen) in enumerate(zip(items, _params(params, len(items)), strict=True)):
        try:
            tasks.append(make(item, chosen))
        except RequestError as error:
            raise numbered(error, index, len(items)) from None
    return tasks


def completion_task(
    given: PromptLike, params: SamplingParams, model: pb.Model, stream: bool = False
) -> Task:
    """The task of a prompt; RequestError names what is not valid."""
    prompt = prompt_of(given)
    fields = {"prompt": prompt.text if prompt.token_ids is None else prompt.token_ids}
    request = validate_object(CompletionRequest, {**fields, "stream": stream, **_fields(params)})
    check_extras(request, refuse_unknown=True)
    request.resolve_truncation(model.max_model_len, request.given_max_tokens())
    with encodable_texts():
        job = request.job(model.id, model.max_model_len)
    return Task(prompt, _asking_for_prompt(job) if prompt.token_ids is None else job)


def chat_task(
    messages: Conversation,
    params: SamplingParams,
    fields: Mapping[str, Any],
    model: pb.Model,
    limits: BodyLimits,
    stream: bool = False,
) -> Task:
    """The task of a conversation. `fields` are further fields of a chat request, such as
    `chat_template_kwargs`; RequestError names what is not valid."""
    known = ChatRequest.model_fields.keys() - _NOT_FOR_CHAT
    for name in fields:
        if name in NAMES:
            raise invalid(name, f"{name} is a sampling parameter; give it in params")
        if name not in known:
            raise invalid(name, f"{name} is not a field of a chat{suggestion(name, known)}")
    sampling = _fields(params)
    if "logprobs" in sampling:
        sampling |= {"logprobs": True, "top_logprobs": sampling["logprobs"]}
    given = listed(messages, "messages", "a list of messages")
    for index, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise invalid(
                f"messages[{index}]",
                f"messages[{index}] is of type {type(message).__name__}; give a mapping with role "
                "and content",
            )
    body = {"messages": [dict(message) for message in given], "stream": stream}
    request = validate_object(ChatRequest, {**body, **fields, **sampling})
    check_extras(request, refuse_unknown=True)
    request.resolve_truncation(model.max_model_len, request.given_max_tokens())
    with encodable_texts():
        job = request.job(model.id, ServedModel.of(model), limits)
    if job.ignored:
        warnings.warn(
            f"this model's chat template does not render {', '.join(job.ignored)}", stacklevel=2
        )
    return Task(Prompt(), _asking_for_prompt(job))


def numbered(error: RequestError, index: int, count: int) -> RequestError:
    """The error of one of `count` prompts, with the prompt's number."""
    if count == 1:
        return error
    return replace(error, message=f"prompt {index}: {error.message}")


def _params(params: ParamsLike, count: int) -> Sequence[SamplingParams]:
    """The parameters of each of `count` prompts; RequestError if their number differs."""
    if params is None:
        return [SamplingParams()] * count
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise invalid(
            "params",
            f"params has {len(params)} entries for {count} prompts; give one for each, or one for "
            "all",
        )
    return params


def _fields(params: SamplingParams) -> dict[str, Any]:
    if not isinstance(params, SamplingParams):
        raise invalid(
            "params", f"params is of type {type(params).__name__}; give SamplingParams(...)"
        )
    return params.fields()


def prompt_of(given: PromptLike) -> Prompt:
    """The prompt in a caller's input; RequestError for other input."""
    if isinstance(given, Mapping):
        names = [name for name in ("prompt", "prompt_token_ids") if given.get(name) is not None]
        if len(names) != 1 or len(given) != 1:
            raise invalid(
                "prompt",
                f"a prompt has the keys {', '.join(map(repr, given))}; give 'prompt' or "
                "'prompt_token_ids' alone",
            )
        given = given[names[0]]
    if isinstance(given, str):
        return Prompt(text=given)
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        ids: list[Any] = list(given)
        # The API's request checks the other items; it would read a list of texts as many prompts.
        if not ids or isinstance(ids[0], int):
            return Prompt(token_ids=ids)
    raise invalid(
        "prompt", f"a prompt is a {type(given).__name__}; give a text or a list of token ids"
    )


def _asking_for_prompt(job: Job) -> Job:
    """The job, changed so that its generations receive the token ids of their prompt."""
    wishes = replace(job.prompts[0], ids=True) if job.prompts else PromptWishes(ids=True)
    ask_for_prompt(job.requests[0], wishes)
    return replace(job, prompts=(wishes,))
