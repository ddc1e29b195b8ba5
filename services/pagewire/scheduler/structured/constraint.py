"""A request's constraint as it travels to the worker."""

from pagewire.errors import invalid
from pagewire.limits import INT32_MAX
from pagewire.sampling import StopConditions
from pagewire.scheduler.structured.grammars import field_of
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2


def structured_constraint(
    message: pb.GenerateRequest, grammar: str, stop: StopConditions, stop_ids: tuple[int, ...]
) -> bytes:
    """A serialized Constraint of worker.proto.

    Args:
        message: the request.
        grammar: that of its structured output.
        stop: its stop conditions.
        stop_ids: the tokens that end it, the model's own included, even with `ignore_eos`: where
            the grammar leaves nothing else, the output ends.
    """
    output = message.structured_output
    if message.HasField("beam_search"):
        field = field_of(output)
        raise invalid(field, f"{field} cannot be combined with a beam search; remove one of them")
    if not stop_ids:
        raise invalid(
            "stop_token_ids",
            "this model has no end-of-sequence token, so a structured output needs stop_token_ids",
        )
    return worker_pb2.Constraint(
        grammar=grammar,
        begin_after=output.begin_after,
        end_token_ids=stop_ids,
        min_tokens=INT32_MAX if stop.ignore_eos else stop.min_tokens,
    ).SerializeToString()
