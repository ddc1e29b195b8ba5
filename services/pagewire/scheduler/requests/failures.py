"""The errors of requests that cannot be completed."""

from pagewire.errors import Code, RequestError, invalid
from pagewire.scheduler.core.sequence import Sequence
from pagewire.suspicion import MAX_CRASHES_ALONE


def draining() -> RequestError:
    """The scheduler ends, and accepts no new request.

    Proxies retry a call that fails with this reason at another scheduler (deploy/envoy/envoy.yaml).
    """
    return RequestError(
        Code.UNAVAILABLE, "this scheduler is draining; use another one", reason="draining"
    )


def parsing_failed() -> RequestError:
    """Parsing raised an error that is not the client's."""
    return RequestError(
        Code.INTERNAL, "the request could not be parsed; the scheduler's log says why"
    )


def helper_failed(reason: str) -> RequestError:
    """The helper process that should have tokenized the request returned no result."""
    return RequestError(
        Code.INTERNAL, f"the request could not be tokenized: {reason}; shorten it or try again"
    )


def queueing_failed() -> RequestError:
    """Queueing a parsed request raised an error."""
    return RequestError(
        Code.INTERNAL, "the request could not be queued; the scheduler's log says why"
    )


def lost_workers(sequence: Sequence) -> RequestError:
    """Workers ended while they computed this sequence alone, and others did not."""
    losses = sequence.suspicion.losses if sequence.suspicion is not None else 0
    return RequestError(
        Code.INTERNAL,
        f"{losses} workers in a row were lost while they computed this request, the last "
        f"{MAX_CRASHES_ALONE} with nothing else to compute; it is not run again",
    )


def worker_failed(message: str, field: str = "") -> RequestError:
    """The worker reports an error, and the sequence has no retry left.

    `field` is the request's field that caused it; see `SlotError` in worker.proto.
    """
    if field:
        return invalid(field, message)
    return RequestError(Code.INTERNAL, f"the worker failed: {message}")


def no_logprobs() -> RequestError:
    """A beam search lacks the candidates of its next tokens."""
    return RequestError(Code.INTERNAL, "the worker sent no log probabilities")


def no_ready_worker(seconds: float) -> RequestError:
    """No worker was ready in the time that a request waits."""
    return RequestError(
        Code.UNAVAILABLE,
        f"this scheduler has had no ready worker for {seconds:g} s; use another one, or try again "
        "later",
    )


def remaining_workers_too_small(sequence: Sequence) -> RequestError:
    """The workers that could have run the sequence are lost."""
    return RequestError(
        Code.UNAVAILABLE,
        f"the request needs KV for {sequence.max_computed} tokens, more than the workers take "
        "that this scheduler has left; use another one, or try again later",
    )


def reserved() -> RequestError:
    """The scheduler is reserved for another gateway."""
    return RequestError(
        Code.UNAVAILABLE,
        "this scheduler runs another request alone for some seconds; use another scheduler, or "
        "try again then",
    )


def too_large(sequence: Sequence) -> RequestError:
    """No worker can run the sequence at its longest."""
    return RequestError(
        Code.RESOURCE_EXHAUSTED,
        f"the request needs KV for {sequence.max_computed} tokens, more than any worker "
        "takes; lower max_tokens or shorten the prompt",
    )
