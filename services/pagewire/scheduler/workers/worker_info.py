"""From a worker's WorkerInfo and the settings to the limits that the core plans with."""

from collections.abc import Iterable

from pagewire.config import SchedulerConfig
from pagewire.limits import INT32_MAX
from pagewire.paging import blocks_before
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.host_tier import NO_HOST_MEMORY, HostMemory
from pagewire.scheduler.core.pooling import ModelPooling
from pagewire.v1 import inference_pb2 as inference_pb
from pagewire.v1 import worker_pb2 as pb

# The tasks of workers that pool, by their names in worker.proto.
PROTO_TASKS = {"embed": inference_pb.POOLING_TASK_EMBED, "score": inference_pb.POOLING_TASK_SCORE}


def worker_limits(config: SchedulerConfig, info: pb.WorkerInfo) -> WorkerLimits:
    """The sizes to plan with; ValueError if the worker's are impossible."""
    for name in ("block_size", "num_slots", "max_model_len", "max_num_batched_tokens"):
        if not getattr(info, name):
            raise ValueError(f"its {name} is 0")
    if info.max_drafts >= info.block_size:
        raise ValueError(
            f"its max_drafts is {info.max_drafts}, and its blocks have "
            f"{info.block_size} tokens: it must be less"
        )
    if info.window and info.max_drafts:
        raise ValueError(f"it has max_drafts {info.max_drafts} beside a window of {info.window}")
    budget = min(config.max_num_batched_tokens or 2**31, info.max_num_batched_tokens)
    return WorkerLimits(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        num_slots=min(config.max_num_seqs or 2**31, info.num_slots, budget),
        max_num_batched_tokens=budget,
        max_model_len=info.max_model_len,
        piggyback_tokens=min(info.piggyback_tokens, budget),
        memory_threshold=config.memory_threshold,
        long_prompt_share=config.long_prompt_share,
        prefix_caching=config.prefix_caching,
        # Layers with a window read shared blocks once for each row, and tables have gaps.
        prefix_groups=info.prefix_groups and not info.window,
        # Only the prefix cache finds blocks in host memory.
        host=_host_memory(info) if config.prefix_caching else NO_HOST_MEMORY,
        window=info.window,
        max_drafts=info.max_drafts,
    )


def unlike(info: pb.WorkerInfo, others: Iterable[pb.WorkerInfo]) -> str | None:
    """The difference for which a request that moves to others may get another answer, or None.

    The text follows the name of the worker.
    """
    if all(other.batch_invariant == info.batch_invariant for other in others):
        return None
    has = "has" if info.batch_invariant else "has no"
    return (
        f"{has} --batch-invariant, unlike others: a request that moves between them may get "
        "another answer; start all workers with the same"
    )


def model_pooling(info: pb.WorkerInfo) -> ModelPooling | None:
    """The worker's pooling; None if it generates. ValueError if the pooling is not known here."""
    if not info.HasField("pooling"):
        return None
    given = info.pooling
    return ModelPooling(
        task=given.task,
        size=given.size,
        activation=given.activation,
        whole_prompt=given.whole_prompt,
        pair_format=given.pair_format,
    )


def pool_tokens(info: pb.WorkerInfo) -> int:
    """The most tokens of a sequence for which the worker's pool has enough blocks."""
    total = info.num_blocks - 1
    if info.window and blocks_before(info.window, info.block_size) < total:
        return INT32_MAX
    return total * info.block_size


def _host_memory(info: pb.WorkerInfo) -> HostMemory:
    if not info.host_blocks:
        return NO_HOST_MEMORY
    if info.window:
        raise ValueError(f"it has {info.host_blocks} host_blocks beside a window of {info.window}")
    for name in ("save_block_seconds", "load_block_seconds", "prefill_token_seconds"):
        if not getattr(info, name) > 0:
            raise ValueError(f"it has {info.host_blocks} host_blocks and no {name}")
    if not info.prefill_pair_seconds >= 0:
        raise ValueError(f"its prefill_pair_seconds is {info.prefill_pair_seconds}")
    return HostMemory(
        num_blocks=info.host_blocks,
        save_block=info.save_block_seconds,
        load_block=info.load_block_seconds,
        prefill_token=info.prefill_token_seconds,
        prefill_pair=info.prefill_pair_seconds,
    )
