"""The models and the load of a scheduler, computed when they are read: steps cost nothing.

Prometheus reads metrics on its own thread: the functions here that it calls must allow that.
"""

import math
from collections.abc import Sequence
from functools import partial

from pagewire.scheduler import metrics
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.sequence import State
from pagewire.scheduler.requests.open_requests import OpenRequests
from pagewire.scheduler.requests.queue_bounds import QueueBounds
from pagewire.scheduler.text.output_formats import OutputFormats
from pagewire.scheduler.text.tokenizer import TokenIdsOnly, Tokenizer
from pagewire.scheduler.workers.ready_workers import ReadyWorkers
from pagewire.scheduler.workers.worker_info import PROTO_TASKS
from pagewire.v1 import inference_pb2 as pb


def load(workers: ReadyWorkers, admission: Admission, bounds: QueueBounds) -> pb.Load:
    """The load by which gateways choose schedulers."""
    full = bounds.refusal(moved=False, tokens=1)
    counted = counts(workers, admission)
    counted.retry_after_seconds = math.ceil(full.retry_after or 0) if full else 0
    return counted


def counts(workers: ReadyWorkers, admission: Admission) -> pb.Load:
    """The counts in the load; may be called on any thread."""
    batches = workers.batches()
    return pb.Load(
        waiting=len(admission.waiting) + len(admission.held),
        running=sum(batch.num_running for batch in batches),
        used_blocks=sum(batch.pool.used for batch in batches),
        total_blocks=sum(batch.pool.total for batch in batches),
        ready_workers=len(admission.batches),
        preemptions=admission.preemptions,
    )


def list_models(
    name: str,
    root: str,
    created: int,
    tokenizer: Tokenizer | TokenIdsOnly,
    workers: ReadyWorkers,
    formats: OutputFormats,
    template_inputs: Sequence[str],
) -> pb.ListModelsResponse:
    """The model, once a worker has been ready to serve it; `root` is what it was read from."""
    limits = workers.limits
    if limits is None:
        return pb.ListModelsResponse()
    model = pb.Model(
        id=name,
        created=created,
        max_model_len=limits.max_tokens,
        vocab_size=limits.vocab_size,
        has_chat_template=tokenizer.chat_template is not None,
        root=root,
        task=PROTO_TASKS[limits.pooling.task] if limits.pooling is not None else None,
        tool_parser=formats.tools,
        reasoning_parser=formats.reasoning,
        reasoning_starts=formats.reasoning_starts,
        reasoning_end_token_id=formats.reasoning_end_token,
        template_inputs=template_inputs,
    )
    return pb.ListModelsResponse(models=[model])


def publish(requests: OpenRequests, workers: ReadyWorkers, admission: Admission) -> None:
    """Connects the metrics with the state of an engine."""
    for state in (State.PENDING, State.PREFILL, State.DECODE):
        gauge = metrics.OPEN_REQUESTS.labels(state.name.lower())
        gauge.set_function(partial(requests.in_state, state))
    metrics.BLOCKS.labels("used").set_function(
        lambda: sum(batch.pool.used for batch in workers.batches())
    )
    metrics.BLOCKS.labels("total").set_function(
        lambda: sum(batch.pool.total for batch in workers.batches())
    )
    metrics.HOST_BLOCKS.labels("used").set_function(
        lambda: sum(batch.pool.host.used for batch in workers.batches())
    )
    metrics.HOST_BLOCKS.labels("total").set_function(
        lambda: sum(batch.pool.host.memory.num_blocks for batch in workers.batches())
    )
    metrics.KV_WASTE.set_function(partial(_kv_waste, workers))
    metrics.READY_WORKERS.set_function(lambda: len(admission.batches))


def _kv_waste(workers: ReadyWorkers) -> float:
    batches = workers.batches()
    places = sum(batch.pool.used * batch.limits.block_size for batch in batches)
    return sum(batch.unused_places for batch in batches) / max(1, places)
