"""Logging to standard error. Log records never contain prompts or outputs.

A line begins with its date in UTC. Records logged while a request is handled have the request's id.
Fields given as `extra=fields(...)` are keys of a line in JSON.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s.%(msecs)03dZ %(levelname).1s {service} %(name)s: %(message)s"
DATE = "%Y-%m-%dT%H:%M:%S"

# This logger writes a line or more for each call of gRPC's event loop.
_CHATTY = "grpc._cython.cygrpc"

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def configure(service: str, level: str, log_format: LogFormat = "text") -> None:
    """Writes log records of this process to standard error, with the name of its service."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service) if log_format == "json" else TextLines(service))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger(_CHATTY).setLevel(logging.INFO)
    logging.captureWarnings(True)


def set_request_id(request_id: str) -> None:
    """Sets the request id of all later records of the current task."""
    _request_id.set(request_id)


def fields(**values: Any) -> dict[str, Any]:
    """The argument `extra` of a log call: keys of a JSON line."""
    return {"fields": values}


class LatestCause:
    """The cause of a fault that lasts, so that not every attempt logs it."""

    def __init__(self) -> None:
        self.reported = ""

    def level(self, cause: str, new: int = logging.WARNING) -> int:
        """The level of a line about a cause: `new`, or debug if the latest line had the same."""
        repeated, self.reported = cause == self.reported, cause
        return logging.DEBUG if repeated else new


class _DatedLines(logging.Formatter):
    def converter(self, timestamp: float | None) -> time.struct_time:
        """Dates are in UTC."""
        return time.gmtime(timestamp)


class TextLines(_DatedLines):
    """A record as text, with the request's id if the message does not have it."""

    def __init__(self, service: str) -> None:
        super().__init__(TEXT.format(service=service), DATE)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the name is logging's
        """The first line of a record."""
        line, request_id = super().formatMessage(record), _id_of(record)
        return line if not request_id or request_id in line else f"{line} (request {request_id})"


class JsonLines(_DatedLines):
    """A record as one line of JSON."""

    def __init__(self, service: str) -> None:
        super().__init__(datefmt=DATE)
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": f"{self.formatTime(record, DATE)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _id_of(record):
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def json_line(service: str, message: str) -> str:
    """A line of JSON at level info, for a process that prints lines without this module's logs."""
    record = logging.LogRecord("pagewire", logging.INFO, "", 0, message, None, None)
    return JsonLines(service).format(record)


def _id_of(record: logging.LogRecord) -> str:
    given = getattr(record, "fields", {}).get("request_id")
    return str(given) if given else _request_id.get()
