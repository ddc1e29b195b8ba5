"""Compiles a grammar once to prove that it compiles. Runs in a helper process."""

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
from pagewire.scheduler.structured.grammars import cannot_compile, field_of, grammar_text
from pagewire.scheduler.structured.schema_checks import check_json, check_schema, too_many
from pagewire.tokenizer_conversion import tokenizer_file
from pagewire.v1 import inference_pb2 as pb

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
        for _, _, schema in embedded_schemas(output.grammar):
            check_schema(schema, field, max_nodes)


def compiled(output: pb.StructuredOutput, tokenizer: LLTokenizer) -> str:
    """The grammar of a StructuredOutput; RequestError if it does not compile."""
    if output.whitespace_pattern:
        blanks = LLMatcher.grammar_from_regex(output.whitespace_pattern)
        _check(blanks, "whitespace_pattern", tokenizer)
    grammar = grammar_text(output, tokenizer)
    _check(grammar, field_of(output), tokenizer)
    return grammar


def _check(grammar: str, field: str, tokenizer: LLTokenizer) -> None:
    """RequestError, which names the field, if a grammar does not compile."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        mask = matcher.compute_bitmask()  # some limits are reached with the first mask
        if any(mask):
            matcher.consume_token(_first_token(mask))  # and others with the first token
    if matcher.is_error():
        reason = matcher.get_error().partition("\n<non-verbose/>")[0].strip()
        raise cannot_compile(field, reason)


def _first_token(mask: bytes) -> int:
    """The first token that a mask allows."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1
