"""The cost of one traced request's spans for the process that makes them.

    python benchmarks/tracing_cost.py

A thread exports the spans, as under load, to an address where nothing listens.
"""

import logging
import time
from collections.abc import Callable

import numpy as np

from pagewire.scheduler.core.sequence import Sampling, Sequence, State
from pagewire.scheduler.request_trace import RequestTrace
from pagewire.tracing.otel import Tracing
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import worker_pb2
from pagewire.worker.protocol.traces import Traces

REQUESTS = 2000
PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def scheduler(tracing: Tracing) -> None:
    """From arrival to the end, without a preemption: four spans."""
    span = tracing.serve("scheduler", PARENT, {"gen_ai.request.model": "m"})
    assert span is not None
    trace = RequestTrace(span)
    trace.admitted("worker:50061", SEQUENCE, lambda: None)
    trace.first_token()
    trace.ended(State.COMPLETED, pb.Finish(reason=pb.FINISH_REASON_STOP))


def worker(traces: Traces) -> None:
    """One sequence in a slot: one span."""
    start = worker_pb2.SequenceStart(slot=1, traceparent=PARENT["traceparent"])
    traces.begin(worker_pb2.Step(step=1, starts=[start]))
    traces.end([1], 100)


def seconds(work: Callable[[], None]) -> float:
    """Mean CPU time of a call on this thread, without the exporter's."""
    began = time.thread_time()
    for _ in range(REQUESTS):
        work()
    return (time.thread_time() - began) / REQUESTS


SEQUENCE = Sequence(
    prompt=np.empty(0, np.int32),
    sampling=Sampling(seed=0, min_tokens=0),
    max_tokens=1,
    stop_ids=(),
    arrival=0,
)


def main() -> None:
    """Prints the times."""
    logging.disable()  # the exporter logs that nothing listens
    tracing = Tracing("bench", "http://127.0.0.1:9", 1.0)
    traces = Traces(tracing)
    print(f"scheduler {1e6 * seconds(lambda: scheduler(tracing)):.0f} us a traced request")
    print(f"worker    {1e6 * seconds(lambda: worker(traces)):.0f} us a traced sequence")


if __name__ == "__main__":
    main()
