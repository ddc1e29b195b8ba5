"""Grammars that are known to compile: checked in helper processes, and kept."""

import asyncio
from collections import OrderedDict

from pagewire.config import SchedulerConfig
from pagewire.errors import Code, RequestError, invalid
from pagewire.helpers.pool import HelperError, HelperPool, TaskError
from pagewire.limits import MAX_GRAMMAR_BYTES, MAX_STOP_STRING_LENGTH
from pagewire.models import resolve_tokenizer
from pagewire.scheduler.structured.grammars import field_of
from pagewire.tokenizer_conversion import has_tokenizer
from pagewire.v1 import inference_pb2 as pb

# The number of grammars, or of errors of those that do not compile, that are kept.
MAX_KEPT = 128
# A larger schema may take long to compile.
_LARGE_BYTES = 4 << 10


class CheckedGrammars:
    """Compiles each grammar once, away from the event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        """No process starts before the first request that needs one."""
        self._pool = HelperPool(
            "compilation of grammars",
            "pagewire.scheduler.structured.compilation:compile_with",
            config,
            size=config.grammar_processes,
            timeout=config.max_grammar_seconds,
        )
        self._has_tokenizer = has_tokenizer(resolve_tokenizer(config.model, config.tokenizer))
        self._max_seconds = config.max_grammar_seconds
        # By the fields that determine the grammar, serialized; the latest used last.
        self._kept: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()

    async def close(self) -> None:
        """Ends the processes."""
        await self._pool.close()

    async def grammar(self, output: pb.StructuredOutput) -> str:
        """The grammar of an output; RequestError if it is malformed or does not compile."""
        check_form(output)
        if not self._has_tokenizer:
            field = field_of(output)
            raise invalid(field, f"{field} needs a tokenizer, and this server has none; remove it")
        asked = pb.StructuredOutput()
        asked.CopyFrom(output)
        asked.ClearField("begin_after")
        key = asked.SerializeToString(deterministic=True)
        task = self._kept.get(key)
        if task is None:
            task = self._kept[key] = asyncio.create_task(self._compile(key, field_of(output)))
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return await asyncio.shield(task)  # other requests may wait for the same grammar

    async def _compile(self, key: bytes, field: str) -> str:
        try:
            return (await self._pool.run(key, large=len(key) > _LARGE_BYTES)).decode()
        except HelperError as error:
            self._kept.pop(key, None)  # it may compile when the machine is less busy
            if isinstance(error, TaskError):
                raise invalid(
                    field,
                    f"{field} cannot be compiled: {error} (max_grammar_seconds is "
                    f"{self._max_seconds:g}); simplify it",
                ) from error
            raise RequestError(
                Code.INTERNAL, f"{field} could not be compiled: {error}; try again"
            ) from error


def check_form(output: pb.StructuredOutput) -> None:
    """RequestError for an output that has no kind, an empty one, or one that is too large."""
    kind, field = output.WhichOneof("kind"), field_of(output)
    if kind is None:
        raise invalid("structured_output", "structured_output is empty; set one of its kinds")
    given = output.choice.values if kind == "choice" else getattr(output, kind)
    if not given:
        raise invalid(field, f"{field} is empty or false; leave it out or give a value")
    if kind == "choice" and not all(given):
        raise invalid(field, f"{field} has an empty text; remove it")
    size = output.ByteSize()
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(
            field, f"{field} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed; shorten it"
        )
    if output.whitespace_pattern and kind not in ("json_schema", "json_object", "structural_tag"):
        raise invalid(
            "whitespace_pattern", f"whitespace_pattern needs a JSON schema, not {kind}; remove it"
        )
    for name in ("tags", "parts"):
        if getattr(output, name) and kind != "grammar":
            raise invalid(name, f"{name} needs a grammar, not {kind}; remove it")
    if len(output.begin_after) > MAX_STOP_STRING_LENGTH:
        raise invalid(
            "begin_after",
            f"begin_after is longer than {MAX_STOP_STRING_LENGTH} characters; shorten it",
        )
