"""From a StructuredOutput to a grammar as llguidance reads it."""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLTokenizer, grammar_from

from pagewire.errors import RequestError, invalid, quoted
from pagewire.grammars.dates import with_real_dates
from pagewire.scheduler.structured.embedded_schemas import with_kept_schemas
from pagewire.scheduler.structured.structural_tag import is_special, structural_tag_grammar
from pagewire.v1 import inference_pb2 as pb

# White space between the tokens of JSON: a blank, or a new line with its indentation. It is bounded
# because a model could otherwise write nothing else until max_tokens.
WHITESPACE = r" |\n {0,20}"

# The most characters of llguidance's message in an error.
MAX_REASON = 600

# The beginnings of llguidance's messages. A schema within a grammar has its place before it.
_PLACE = r"(?:at \d+\(\d+\): failed to compile JSON schema: )?"
_UNSUPPORTED_KEYS = re.compile(rf"{_PLACE}Unimplemented keys: (\[.*\])")
_UNKNOWN_FORMAT = re.compile(rf"{_PLACE}Unknown format: (.*)")
_UNSUPPORTED_ONE_OF = re.compile(f"{_PLACE}oneOf constraints are not supported")

_ANY_OBJECT = '{"type": "object"}'


def field_of(output: pb.StructuredOutput) -> str:
    """The client's name of the field, for error messages."""
    return output.field_name or f"structured_output.{output.WhichOneof('kind') or 'kind'}"


def field_at(output: pb.StructuredOutput, line: int) -> str:
    """The client's name of the field that a line of the grammar comes from."""
    names = [part.field_name for part in output.parts if part.first_line <= line]
    return names[-1] if names else field_of(output)


def grammar_text(output: pb.StructuredOutput, tokenizer: LLTokenizer) -> str:
    """The grammar, not compiled yet; RequestError if the output is malformed."""
    kind = output.WhichOneof("kind")
    field = field_of(output)
    try:
        if kind == "json_schema":
            return _json_grammar(output.json_schema, output)
        if kind == "json_object":
            return _json_grammar(_ANY_OBJECT, output)
        if kind == "regex":
            return _regex_grammar(output.regex)
        if kind == "choice":
            return LLMatcher.grammar_from_lark(choice_lark(list(output.choice.values)))
        if kind == "grammar":
            kept = with_kept_schemas(output.grammar)
            return grammar_from("grammar", kept + _tag_rules(output, tokenizer))
        assert kind == "structural_tag"
        options = _json_options(output)
        return structural_tag_grammar(output.structural_tag, field, tokenizer, options)
    except ValueError as error:
        raise cannot_compile(field, str(error)) from error


def _regex_grammar(regex: str) -> str:
    # llguidance drops such a backslash.
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ValueError("it ends with a backslash that escapes nothing")
    return LLMatcher.grammar_from_regex(regex)


def _tag_rules(output: pb.StructuredOutput, tokenizer: LLTokenizer) -> str:
    """The rules of StructuredOutput.tags."""
    rules = [r"TEXT_TO_TAG: /(.|\n)*/"] if output.tags else []
    for i, tag in enumerate(output.tags):
        if is_special(tokenizer, tag):  # such a token is not text, so it needs no lazy rule
            (token,) = tokenizer.tokenize_str(tag, parse_special=True)
            lines = [f"tag_{i}: <[{token}]>", f"text_to_tag_{i}: TEXT_TO_TAG tag_{i}"]
        else:
            text = _lark_text(tag)
            lines = [f"tag_{i}: {text}", f"text_to_tag_{i}[lazy]: TEXT_TO_TAG {text}"]
        rules += lines
    return "".join(f"\n{rule}" for rule in rules)


def choice_lark(values: list[str]) -> str:
    """A grammar of some texts.

    They form one terminal. As alternatives of a rule, 2,000 of them would exceed a limit of
    llguidance's parser.
    """
    return "start: CHOICE\nCHOICE: " + " | ".join(map(_lark_text, values))


def _lark_text(text: str) -> str:
    """A text as a literal of Lark, which refuses the one control character that JSON allows."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def cannot_compile(field: str, reason: str) -> RequestError:
    """The error of a grammar that does not compile, with llguidance's reason."""
    if (found := _UNSUPPORTED_KEYS.match(reason)) is not None:
        keys = ", ".join(json.loads(found[1]))
        return invalid(field, f"{field} has keywords that are not supported: {keys}; remove them")
    if (found := _UNKNOWN_FORMAT.match(reason)) is not None:
        shown = quoted(found[1])
        return invalid(
            field,
            f"{field} has format {shown}, which is not supported; use a pattern, or remove it",
        )
    if _UNSUPPORTED_ONE_OF.match(reason) is not None:
        reason = "oneOf with branches that overlap is not supported; use anyOf"
    if reason == "NoExtensionBias":
        return invalid(field, f"{field} allows no text at all; correct it")
    return invalid(field, f"{field} cannot be compiled: {shortened(reason)}")


def shortened(reason: str) -> str:
    """The beginning of a message that may quote a client's input."""
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


def _json_grammar(schema: str, output: pb.StructuredOutput) -> str:
    value = json.loads(schema)
    if with_real_dates(value):
        schema = json.dumps(value)
    return LLMatcher.grammar_from_json_schema(schema, overrides=_json_options(output))


def _json_options(output: pb.StructuredOutput) -> Any:
    """Options of the JSON compiler. A client's own `x-guidance` cannot switch checks off."""
    return {
        "whitespace_pattern": output.whitespace_pattern or WHITESPACE,
        "lenient": False,
        "coerce_one_of": False,
    }
