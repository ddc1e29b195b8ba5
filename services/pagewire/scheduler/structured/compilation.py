"""Compiles a grammar once to prove that it compiles. Runs in a helper process."""

import re
import resource
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError
from llguidance import LLMatcher, LLTokenizer

from pagewire.config import SchedulerConfig
from pagewire.errors import invalid
from pagewire.grammars.limits import parser_limits
from pagewire.models import eos_token_ids, resolve_model, resolve_tokenizer
from pagewire.rpc.interceptors import UNDECODABLE
from pagewire.scheduler.structured.embedded_schemas import embedded_schemas
from pagewire.scheduler.structured.grammars import cannot_compile, field_at, field_of, grammar_text
from pagewire.scheduler.structured.schema_checks import check_json, check_schema, too_many
from pagewire.tokenizer_conversion import tokenizer_file
from pagewire.v1 import inference_pb2 as pb

# The line and the column at the beginning of llguidance's message, and the lines of the grammar at
# its end.
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\n +\d+ \| ")
# Address space of a helper process.
_MAX_BYTES = 4 << 30


def compile_with(config: SchedulerConfig) -> Callable[[bytes], bytes]:
    """The function of a helper process: from a serialized StructuredOutput to its grammar."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    tokenizer = read_tokenizer(
        resolve_model(config.model), resolve_tokenizer(config.model, config.tokenizer)
    )

    def compute(task: bytes) -> bytes:
        try:
            output = pb.StructuredOutput.FromString(task)
        except DecodeError as error:
            raise invalid("structured_output", UNDECODABLE) from error
        check_size(output, config.max_grammar_nodes)
        return compiled(output, tokenizer).encode()

    return compute


def read_tokenizer(model: Path, tokenizer: Path | None = None) -> LLTokenizer:
    """The tokenizer of a model's folder, or of another one."""
    eos = list(eos_token_ids(model))
    return LLTokenizer(str(tokenizer_file(tokenizer or model)), eos_token=eos or None)


def check_size(output: pb.StructuredOutput, max_nodes: int) -> None:
    """RequestError for a schema that is too large or not enforced, and for too many choices."""
    field, kind = field_of(output), output.WhichOneof("kind")
    if kind == "choice":
        if len(output.choice.values) > max_nodes:
            raise too_many(field, len(output.choice.values), max_nodes)
    elif kind in ("json_schema", "structural_tag"):
        check_json(getattr(output, kind), field, max_nodes)
    elif kind == "grammar":
        for begin, _, schema in embedded_schemas(output.grammar):
            line = 1 + output.grammar.count("\n", 0, begin)
            check_schema(schema, field_at(output, line), max_nodes)


def compiled(output: pb.StructuredOutput, tokenizer: LLTokenizer) -> str:
    """The grammar of a StructuredOutput; RequestError if it does not compile."""
    if output.whitespace_pattern:
        blanks = LLMatcher.grammar_from_regex(output.whitespace_pattern)
        if reason := _fault(blanks, tokenizer):
            raise cannot_compile("whitespace_pattern", reason)
    grammar = grammar_text(output, tokenizer)
    if reason := _fault(grammar, tokenizer):
        field, place = field_of(output), _PLACE.match(reason)
        if place is not None and (part := field_at(output, int(place[1]))) != field:
            # The client has not written the grammar, only this part.
            field, reason = part, _EXCERPT.split(reason[place.end() :], maxsplit=1)[0]
        raise cannot_compile(field, reason)
    return grammar


def _fault(grammar: str, tokenizer: LLTokenizer) -> str:
    """The reason why a grammar does not compile; empty if it does."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        mask = matcher.compute_bitmask()  # some limits are reached with the first mask
        if any(mask):
            matcher.consume_token(_first_token(mask))  # and others with the first token
    if not matcher.is_error():
        return ""
    return str(matcher.get_error()).partition("\n<non-verbose/>")[0].strip()


def _first_token(mask: bytes) -> int:
    """The first token that a mask allows."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1
