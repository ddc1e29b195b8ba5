"""A request's constraint as it travels to the worker."""

from pagewire.errors import invalid
from pagewire.limits import INT32_MAX
from pagewire.packing import pack
from pagewire.sampling import SamplingParams, StopConditions
from pagewire.scheduler.structured.grammars import field_of
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2


def constraining_field(message: pb.GenerateRequest) -> str:
    """What the client calls the first field that constrains the output; empty if there is none."""
    if message.HasField("structured_output"):
        return field_of(message.structured_output)
    if message.sampling.allowed_token_ids:
        return "allowed_token_ids"
    return "bad_words" if message.sampling.bad_words else ""


def constraint_of(
    message: pb.GenerateRequest,
    grammar: str,
    params: SamplingParams,
    stop: StopConditions,
    stop_ids: tuple[int, ...],
    tokenizer: Tokenizer | TokenIdsOnly,
) -> bytes:
    """A serialized Constraint of worker.proto; empty if any token may come.

    Args:
        message: the request.
        grammar: that of its structured output; empty for none.
        params: its sampling parameters.
        stop: its stop conditions.
        stop_ids: the tokens that end it. With a grammar they have the model's own even with
            `ignore_eos`: where the grammar leaves nothing else, the output ends.
        tokenizer: that of the model.
    """
    if not constraining_field(message):
        return b""
    if grammar and not stop_ids:
        raise invalid(
            "stop_token_ids",
            "this model has no end-of-sequence token, so a structured output needs stop_token_ids",
        )
    banned = _banned_sequences(params.bad_words, tokenizer)
    return worker_pb2.Constraint(
        grammar=grammar,
        begin_after=message.structured_output.begin_after,
        end_token_ids=stop_ids,
        min_tokens=INT32_MAX if grammar and stop.ignore_eos else stop.min_tokens,
        allowed_token_ids=pack(sorted(set(params.allowed_token_ids))),
        banned_token_ids=pack([token for tokens in banned for token in tokens]),
        banned_lengths=pack([len(tokens) for tokens in banned]),
    ).SerializeToString()


def _banned_sequences(
    words: tuple[str, ...], tokenizer: Tokenizer | TokenIdsOnly
) -> list[tuple[int, ...]]:
    """The tokens of each word, at the beginning of a text and after a blank; each sequence once."""
    if words and isinstance(tokenizer, TokenIdsOnly):
        raise invalid("bad_words", "bad_words needs a tokenizer, which this server has not")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False).tolist())] = None
    return [tokens for tokens in found if tokens]
