"""llguidance beside xgrammar: schemas that compile, time to compile, time of a mask, valid outputs.

Both receive the same random schemas, and schemas with one further keyword each, and draw random
tokens from their own masks. `jsonschema` decides whether an output is valid; a cut output does not
count. A keyword is enforced if all outputs are valid, refused if the schema does not compile, and
otherwise ignored. The vocabulary is that of the embedded model, or has `--tokens` tokens.

xgrammar is not a dependency; it needs torch:

    python -m venv /tmp/engines && /tmp/engines/bin/pip install xgrammar llguidance jsonschema torch
    PYTHONPATH=services:shared /tmp/engines/bin/python benchmarks/grammar_engines.py --tokens 128000
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np

from pagewire.bench.results import command_line, figures_of, write_rows
from pagewire.bench.schemas import Schema, random_schema

EOS = 2
MODEL = Path(__file__).parents[1] / "shared/pagewire/embedded/model/tokenizer.json"
# Keywords that are not in every engine: the property `x` of an object.
KEYWORDS: dict[str, Schema] = {
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "uniqueItems": True},
    "not": {"enum": ["a", "b"], "not": {"const": "a"}},
    "minLength": {"type": "string", "minLength": 4, "maxLength": 5},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    "minimum of number": {"type": "number", "minimum": 2.5, "maximum": 7},
    "minItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}},
    "minProperties": {"type": "object", "additionalProperties": {"const": 1}, "minProperties": 2},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^a$": {"const": 1}},
        "additionalProperties": False,
    },
    "oneOf that overlaps": {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
    "allOf": {"allOf": [{"type": "string", "maxLength": 3}, {"minLength": 3}]},
    "dependentRequired": {
        "properties": {"a": {"const": 1}, "b": {"const": 1}},
        "type": "object",
        "additionalProperties": False,
        "dependentRequired": {"a": ["b"]},
    },
    "if": {"enum": [1, 2], "if": {"const": 1}, "then": {"const": 2}},
    "format": {"type": "string", "format": "ipv4"},
    "pattern and maxLength": {"type": "string", "pattern": "^a+$", "maxLength": 2},
}


class Matcher(Protocol):
    """The state of one output."""

    def mask(self) -> np.ndarray: ...  # uint8, bits of allowed tokens

    def take(self, token: int) -> None: ...


class Llguidance:
    """llguidance, with a tokenizer made from the bytes of each token."""

    def __init__(self, tokens: list[bytes]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self._tokenizer = LLTokenizer(TokenizerWrapper(_Greedy(tokens)))
        self._bytes = -(-len(tokens) // 32) * 4

    def compile(self, schema: Schema) -> Callable[[], Matcher]:
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        size = self._bytes

        class Own:
            def __init__(self) -> None:
                self._matcher = compiled.deep_copy()
                self._out = np.zeros(size, np.uint8)

            def mask(self) -> np.ndarray:
                self._matcher.unsafe_compute_mask_ptr(self._out.ctypes.data, size)
                return self._out

            def take(self, token: int) -> None:
                assert self._matcher.consume_token(token)

        return Own


class _Greedy:
    """The tokenizer interface that llguidance needs."""

    bos_token_id = None
    eos_token_id = EOS

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.special_token_ids = [EOS]
        self._ids = {token: i for i, token in enumerate(tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self._ids[data[i : i + 1]] for i in range(len(data))]


class Xgrammar:
    """xgrammar, without optional white space, as llguidance above."""

    def __init__(self, tokens: list[bytes]) -> None:
        import torch
        import xgrammar

        self._xgrammar, self._torch = xgrammar, torch
        self._count = len(tokens)
        info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Schema) -> Callable[[], Matcher]:
        text = json.dumps(schema)
        compiled = self._compiler.compile_json_schema(
            text, any_whitespace=False, separators=(",", ":"), strict_mode=False
        )
        xgrammar, count = self._xgrammar, self._count

        class Own:
            def __init__(self) -> None:
                self._matcher = xgrammar.GrammarMatcher(compiled)
                self._out = xgrammar.allocate_token_bitmask(1, count)

            def mask(self) -> np.ndarray:
                self._matcher.fill_next_token_bitmask(self._out)
                return self._out.numpy().view(np.uint8)[0]

            def take(self, token: int) -> None:
                assert self._matcher.accept_token(token)

        return Own


def read_tokens(count: int | None) -> list[bytes]:
    """The bytes of every token: all single bytes, special tokens first."""
    from pagewire.scheduler.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(MODEL.parent)
    own = [tokenizer.token_bytes(i) for i in range(4096)]
    if count is None:
        return own
    draw, seen = random.Random(0), dict.fromkeys(own)
    words = [token for token in own if len(token) > 1]
    while len(seen) < count:
        seen[b"".join(draw.sample(words, draw.randint(2, 3)))] = None
    return list(seen)


def draw_output(
    matcher: Matcher, count: int, seed: int, limit: int
) -> tuple[list[int], list[float]]:
    """Tokens drawn from the masks of a matcher, the end last, and the seconds of each mask."""
    draw = random.Random(seed)
    output: list[int] = []
    seconds: list[float] = []
    while len(output) < limit:
        began = time.thread_time()
        mask = matcher.mask()
        seconds.append(time.thread_time() - began)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:count])
        token = EOS if EOS in allowed and draw.random() < 0.5 else int(draw.choice(allowed))
        output.append(token)
        matcher.take(token)
        if token == EOS:
            break
    return output, seconds


def measure(engine: Any, tokens: list[bytes], schemas: int, outputs: int) -> dict[str, Any]:
    """Figures of an engine over random schemas."""
    compile_seconds, mask_seconds, failed, invalid, complete = [], [], 0, 0, 0
    for seed in range(schemas):
        schema = random_schema(seed)
        began = time.thread_time()
        try:
            begin = engine.compile(schema)
        except (ValueError, RuntimeError):
            failed += 1
            continue
        compile_seconds.append(time.thread_time() - began)
        for each in range(outputs):
            output, seconds = draw_output(begin(), len(tokens), each, 400)
            mask_seconds += seconds
            if output[-1] == EOS:
                complete += 1
                invalid += not valid(schema, tokens, output)
    return {
        "schemas": schemas,
        "schemas_refused": failed,
        "compile_ms": {
            "median": 1e3 * statistics.median(compile_seconds),
            "p99": 1e3 * float(np.quantile(compile_seconds, 0.99)),
        },
        "mask_us": {
            "mean": 1e6 * statistics.mean(mask_seconds),
            "p99": 1e6 * float(np.quantile(mask_seconds, 0.99)),
            "max": 1e6 * max(mask_seconds),
        },
        "outputs": complete,
        "outputs_invalid": invalid,
    }


def keywords(engine: Any, tokens: list[bytes], outputs: int) -> dict[str, str]:
    """The result for each keyword: enforced, refused or ignored."""
    found = {}
    for name, part in KEYWORDS.items():
        schema = {
            "type": "object",
            "properties": {"x": part},
            "required": ["x"],
            "additionalProperties": False,
        }
        try:
            begin = engine.compile(schema)
        except (ValueError, RuntimeError):
            found[name] = "refused"
            continue
        drawn = [draw_output(begin(), len(tokens), seed, 300)[0] for seed in range(outputs)]
        ended = [output for output in drawn if output[-1] == EOS]
        sound = all(valid(schema, tokens, output) for output in ended)
        found[name] = "enforced" if sound and ended else "ignored"
    return found


def valid(schema: Schema, tokens: list[bytes], output: list[int]) -> bool:
    text = b"".join(tokens[token] for token in output[:-1])
    try:
        value = json.loads(text)
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, help="size of the vocabulary; default: the model's")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--outputs", type=int, default=5, help="of each schema")
    parser.add_argument("--output", type=Path, help="write the figures as rows")
    args = parser.parse_args()
    tokens = read_tokens(args.tokens)
    figures: dict[str, Any] = {}
    for name, engine_of in (("llguidance", Llguidance), ("xgrammar", Xgrammar)):
        engine = engine_of(tokens)
        figures[name] = measure(engine, tokens, args.schemas, args.outputs)
        fates = keywords(engine, tokens, 40)
        for fate in ("enforced", "refused", "ignored"):
            figures[name][f"keywords_{fate}"] = sum(each == fate for each in fates.values())
        print(name, json.dumps(figures[name], indent=2))
        print({name: fate for name, fate in fates.items() if fate != "enforced"})
    if args.output:
        write_rows(args.output, figures_of(figures), command_line())


if __name__ == "__main__":
    main()
