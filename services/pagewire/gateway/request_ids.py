"""Ids of requests: from the client, or made here; sent in a header of the answer, and in logs."""

import re
import secrets
import uuid
from dataclasses import replace
from typing import Any

from starlette.types import Scope

from pagewire.errors import invalid
from pagewire.gateway.api.events import AnswerForm
from pagewire.gateway.api.job import Job
from pagewire.limits import MAX_GIVEN_ID_LENGTH

HEADER = "x-request-id"
_ENCODED = HEADER.encode()
_VALID = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_GIVEN_ID_LENGTH)
# The key of the id in the state of a request.
STATE = "request_id"


def given_id(scope: Scope) -> str | None:
    """The id in a request's header; None without one, RequestError if it is not valid."""
    for name, value in scope.get("headers", ()):
        if name == _ENCODED:
            if not _VALID.fullmatch(value):
                raise invalid(
                    "X-Request-Id",
                    "the header X-Request-Id must have 1 to "
                    f"{MAX_GIVEN_ID_LENGTH} visible ASCII characters; change it or leave it out",
                )
            return str(value.decode())
    return None


def answered_id(state: dict[str, Any]) -> str:
    """The id in an answer; makes one for a request without an id."""
    state[STATE] = state.get(STATE) or uuid.uuid4().hex
    return str(state[STATE])


def answered_header(state: dict[str, Any]) -> tuple[bytes, bytes]:
    """The header of an answer."""
    return _ENCODED, answered_id(state).encode()


def identified(job: Job, state: dict[str, Any]) -> Job:
    """The job with its client's id: the body's, otherwise the header's, if any.

    Also stores the id in `state`. Schedulers get the id with a random suffix, because clients may
    use an id again while its request runs.
    """
    given = job.request_id or state.get(STATE)
    if isinstance(job.formatter, AnswerForm):
        return _identified_answer(job, job.formatter, state, given)
    envelope = job.formatter.envelope
    if given is None:
        state[STATE] = envelope.request_id
        return job
    state[STATE] = given
    named = replace(envelope, request_id=given)
    unique = f"{named.id}.{secrets.token_hex(4)}"
    for request in job.requests:
        request.request_id = unique + request.request_id.removeprefix(envelope.id)
    return replace(job, formatter=job.formatter.under(named))


def _identified_answer(job: Job, form: AnswerForm, state: dict[str, Any], given: str | None) -> Job:
    """The same for an answer that keeps the id of its API's form; only its request is renamed."""
    state[STATE] = given or form.request_id
    if given is None:
        return job
    for request in job.requests:
        request.request_id = f"{given}.{secrets.token_hex(4)}"
    return replace(job, formatter=form.under(given))
