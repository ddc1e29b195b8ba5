"""The response object: the repeated fields of the request, the output items, and the usage."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pagewire.gateway.api.formatting import json_ascii
from pagewire.gateway.errors import ApiError
from pagewire.v1 import inference_pb2 as pb

Status = Literal["in_progress", "completed", "incomplete", "failed"]

_NO_USAGE = '"usage":null'


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The parts that all states of one response share.

    `repeated` are the fields that repeat the request, as JSON without braces. They may have
    megabytes and are in three events of a stream, so they are formatted once.
    """

    repeated: str
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    def state(
        self,
        status: Status,
        items: Sequence[str] = (),
        usage: str = _NO_USAGE,
        error: dict[str, Any] | None = None,
    ) -> list[str]:
        """The JSON of the response, in pieces; `items` are its output.

        `repeated` is a separate piece, so that it is not copied.
        """
        details = '{"reason":"max_output_tokens"}' if status == "incomplete" else "null"
        completed = int(time.time()) if status == "completed" else "null"
        return [
            f'{{"id":"{self.id}","object":"response","created_at":{self.created_at},'
            f'"completed_at":{completed},"status":"{status}","error":{json_ascii(error)},'
            f'"incomplete_details":{details},',
            self.repeated,
            f',"output":[{",".join(items)}],{usage}}}',
        ]


def usage_field(usage: pb.Usage, reasoning_tokens: int | None) -> str:
    """The field `usage`, as JSON."""
    return '"usage":' + json_ascii(
        {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
    )


def error_object(error: ApiError) -> dict[str, Any]:
    """The error of a failed response, with a code that OpenAI's clients accept."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return {"code": code, "message": error.message}
