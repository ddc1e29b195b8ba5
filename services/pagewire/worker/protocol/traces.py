"""The spans of a worker: one for each traced sequence, from its start in a slot to its end.

A span begins when a step starts the sequence, and ends when the scheduler reports that it has left.
Both happen on the event loop. Steps in between cost nothing.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagewire.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from pagewire.tracing.otel import OpenSpan, Tracing


class Traces:
    """The open spans of one stream, by slot."""

    def __init__(self, tracing: "Tracing") -> None:
        self._tracing = tracing
        self._open: dict[int, tuple[OpenSpan, int]] = {}

    def begin(self, step: pb.Step) -> None:
        """Begins the spans of the sequences that a step starts."""
        for start in step.starts:
            if start.traceparent:
                self._end(start.slot, step.step)
                self._begin(start, step.step)

    def end(self, slots: Iterable[int], num_steps: int) -> None:
        """Ends the spans of sequences that have left; `num_steps` were received so far."""
        for slot in slots:
            self._end(slot, num_steps)

    def close(self, num_steps: int) -> None:
        """Ends all spans, because the stream has ended."""
        for slot in list(self._open):
            self._open[slot][0].event("stream ended")
            self._end(slot, num_steps)

    def _begin(self, start: pb.SequenceStart, step: int) -> None:
        attributes = {
            "pagewire.slot": start.slot,
            "pagewire.tokens": len(start.token_ids) // 4,
            "pagewire.generated_tokens": start.num_generated,
            "pagewire.cached_tokens": start.num_computed,
        }
        span = self._tracing.serve("worker", {"traceparent": start.traceparent}, attributes)
        if span is not None:
            self._open[start.slot] = span, step

    def _end(self, slot: int, num_steps: int) -> None:
        span, first_step = self._open.pop(slot, (None, 0))
        if span is not None:
            span.set({"pagewire.steps": num_steps - first_step + 1})
            span.end()
