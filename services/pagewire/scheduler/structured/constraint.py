"""A request's constraint as it is sent to the worker."""

from pagewire.errors import invalid
from pagewire.limits import INT32_MAX, MAX_STOP_STRING_LENGTH
from pagewire.packing import pack
from pagewire.sampling import SamplingParams, StopConditions
from pagewire.scheduler.structured.grammars import field_of
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2


def constraining_field(message: pb.GenerateRequest) -> str:
    """The client's name of the first field that constrains the output; empty if there is none."""
    if message.HasField("structured_output"):
        return field_of(message.structured_output)
    if message.HasField("reasoning_budget"):
        return "thinking_token_budget"
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
    """A serialized Constraint of worker.proto; empty if every token is allowed.

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
    constraint = worker_pb2.Constraint(
        grammar=grammar,
        grammar_field=field_of(message.structured_output) if grammar else "",
        begin_after=message.structured_output.begin_after,
        end_token_ids=stop_ids,
        min_tokens=INT32_MAX if grammar and stop.ignore_eos else stop.min_tokens,
        allowed_token_ids=pack(sorted(set(params.allowed_token_ids))),
        banned_token_ids=pack([token for tokens in banned for token in tokens]),
        banned_lengths=pack([len(tokens) for tokens in banned]),
    )
    if message.HasField("reasoning_budget"):
        _limit_reasoning(constraint, message.reasoning_budget, tokenizer)
    return constraint.SerializeToString()


def _limit_reasoning(
    constraint: worker_pb2.Constraint,
    budget: pb.ReasoningBudget,
    tokenizer: Tokenizer | TokenIdsOnly,
) -> None:
    field = "thinking_token_budget"
    if isinstance(tokenizer, TokenIdsOnly):
        raise invalid(field, f"{field} needs a tokenizer, and this server has none; remove it")
    if not budget.end or max(len(budget.begin), len(budget.end)) > MAX_STOP_STRING_LENGTH:
        raise invalid(
            "reasoning_budget",
            "reasoning_budget needs the tag that ends the reasoning; tags have at most "
            f"{MAX_STOP_STRING_LENGTH} characters",
        )
    constraint.max_reasoning_tokens = budget.max_tokens
    constraint.reasoning_begin, constraint.reasoning_end = budget.begin, budget.end
    ids = tokenizer.encode(budget.end, add_special_tokens=False)
    constraint.reasoning_end_ids = pack(ids.tolist())


def _banned_sequences(
    words: tuple[str, ...], tokenizer: Tokenizer | TokenIdsOnly
) -> list[tuple[int, ...]]:
    """The tokens of each word, at the beginning of a text and after a blank; each sequence once."""
    if words and isinstance(tokenizer, TokenIdsOnly):
        raise invalid(
            "bad_words", "bad_words needs a tokenizer, and this server has none; remove it"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False).tolist())] = None
    return [tokens for tokens in found if tokens]
