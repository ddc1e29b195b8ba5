"""What the clients of requests that cannot be completed are told."""

from pagewire.errors import Code, RequestError
from pagewire.scheduler.core.sequence import Sequence
from pagewire.suspicion import MAX_CRASHES_ALONE


def unparsed() -> RequestError:
    """Parsing failed for a reason that is not the client's."""
    return RequestError(
        Code.INTERNAL, "the request could not be parsed; the scheduler's log says why"
    )


def unread(reason: str) -> RequestError:
    """A helper process has no answer for it."""
    return RequestError(
        Code.INTERNAL, f"the request could not be tokenized: {reason}; shorten it or try again"
    )


def unqueued() -> RequestError:
    """What was parsed could not be queued."""
    return RequestError(
        Code.INTERNAL, "the request could not be queued; the scheduler's log says why"
    )


def took_workers_down(sequence: Sequence) -> RequestError:
    """Its workers were lost, one after the other, and others were not."""
    losses = sequence.suspicion.losses if sequence.suspicion is not None else 0
    return RequestError(
        Code.INTERNAL,
        f"{losses} workers in a row were lost while they computed this request, the last "
        f"{MAX_CRASHES_ALONE} with nothing else to compute; it is not run again",
    )


def failed_on_worker(message: str) -> RequestError:
    """Its worker says why; it has been run again as often as it may."""
    return RequestError(Code.INTERNAL, f"the worker failed: {message}")


def no_log_probabilities() -> RequestError:
    """A beam search cannot go on."""
    return RequestError(Code.INTERNAL, "the worker sent no log probabilities")


def no_worker(seconds: float) -> RequestError:
    """Nothing can run here for the time being: continue elsewhere, or come again."""
    return RequestError(
        Code.UNAVAILABLE,
        f"this scheduler has had no ready worker for {seconds:g} s; use another one, or try again "
        "later",
    )


def no_worker_large_enough(sequence: Sequence) -> RequestError:
    """Those that could have run it are gone for the time being."""
    return RequestError(
        Code.UNAVAILABLE,
        f"the request needs KV for {sequence.max_computed} tokens, more than the workers take "
        "that this scheduler has left; use another one, or try again later",
    )


def another_is_tried() -> RequestError:
    """A gateway has the scheduler alone for some seconds."""
    return RequestError(
        Code.UNAVAILABLE,
        "this scheduler tries another request alone for some seconds; use another scheduler, or "
        "come back then",
    )


def too_large(sequence: Sequence) -> RequestError:
    """No worker takes it at its longest."""
    return RequestError(
        Code.RESOURCE_EXHAUSTED,
        f"the request needs KV for {sequence.max_computed} tokens, more than any worker "
        "takes; lower max_tokens or shorten the prompt",
    )


def deadline_passed(deadline_ms: int) -> RequestError:
    """Its time is over."""
    return RequestError(
        Code.DEADLINE_EXCEEDED,
        f"the request did not end within its deadline_ms of {deadline_ms} ms; "
        "give it more time or lower max_tokens",
        "deadline_ms",
    )
