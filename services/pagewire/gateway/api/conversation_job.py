"""The job of a conversation that is answered once: as a response or as a message."""

from collections.abc import Callable

from pagewire.errors import invalid
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.api.fields import GenerationFields
from pagewire.gateway.api.job import Job, candidates
from pagewire.gateway.api.limits import BodyLimits
from pagewire.gateway.conversation.conversation import Conversation
from pagewire.gateway.conversation.unread import unread_inputs
from pagewire.gateway.generation.common_fields import CommonFields
from pagewire.gateway.models import ServedModel
from pagewire.gateway.parsers.output_format import OutputFormat
from pagewire.v1 import inference_pb2 as pb


def conversation_job(
    fields: GenerationFields,
    conversation: Conversation,
    form_of: Callable[[OutputFormat | None], AnswerForm],
    *,
    model: str,
    served: ServedModel,
    limits: BodyLimits,
    max_tokens: int | None,
    continues: bool = False,
    logprobs: int | None = None,
) -> Job:
    """The request for a scheduler; RequestError names a field that is not valid.

    `form_of` makes the form of the answer. `continues`: the model continues the last turn.
    `logprobs` likeliest tokens are reported at each place; None reports no log probabilities.
    """
    stop, parameters = checked_parameters(fields, max_tokens)
    output = conversation.output_format(served)
    if logprobs is not None and output is not None:
        raise invalid(
            "include",
            "include asks for log probabilities, which are known for an answer of text alone: not "
            "with tools, and not of a model that reasons; use /v1/chat/completions",
        )
    chat = conversation.chat_input(limits.tools)
    chat.continue_final_message = continues
    form = form_of(output)
    constraint = conversation.constraint(served, fields.wanted_output())
    prompt = pb.GenerateRequest(
        model=model,
        cache_salt=fields.cache_salt or "",
        chat=chat,
        visible_special_tokens=output.tags if output is not None else (),
        structured_output=constraint,
        **fields.input_options(),
    )
    request = fields.candidate_fields(form.request_id, model, stop, logprobs)
    return Job(
        requests=candidates([request], 1),
        common=[CommonFields.of(parameters, prompt, fields.prompt_cache_key)],
        candidates=1,
        n=1,
        formatter=form,
        stream=bool(fields.stream),
        include_usage=False,
        shows_logprobs=logprobs is not None,
        output=output,
        request_id=fields.request_id,
        input_field=conversation.input_field,
        limit_field=fields.max_tokens_name,
        ignored=unread_inputs(conversation, served, constraint),
    )


def checked_parameters(
    fields: GenerationFields, max_tokens: int | None
) -> tuple[pb.StopConditions, bytes]:
    """The stop conditions and `GenerationFields.common_parameters`; RequestError names a field that
    is not valid, or only for other endpoints."""
    for field in ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"):
        value = getattr(fields, field)
        if value is not None and value is not False:
            raise invalid(field, f"{field} is not supported here; use /v1/chat/completions")
    if fields.stream_options is not None and fields.stream_options.continuous_usage_stats:
        field = "stream_options.continuous_usage_stats"
        raise invalid(field, f"{field} is not supported here; use /v1/chat/completions")
    stop = fields.stop_conditions(max_tokens)
    return stop, fields.common_parameters(stop)
