"""The WorkerInfo message: the model and the limits of a worker, for schedulers."""

import uuid

from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.backend import Backend
from pagewire.worker.protocol.steps.limits import Limits


def worker_info(
    model: str,
    dtype: str,
    device: str,
    limits: Limits,
    backend: Backend,
    constraints: bool = False,
    batch_invariant: bool = False,
) -> pb.WorkerInfo:
    """The message of a warm backend, with a new instance_id; call it once in a process.

    `warm_up` measures the backend's costs, so it must run before. `constraints`: whether sequences
    may have a constraint. `batch_invariant`: whether results depend on the request alone.
    """
    info = pb.WorkerInfo(
        model=model,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_slots=limits.num_slots,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        dtype=dtype,
        device=device,
        weight_bytes=backend.weight_bytes,
        kv_cache_bytes=backend.kv_cache_bytes,
        instance_id=uuid.uuid4().hex,
        prefix_groups=backend.prefix_groups,
        host_blocks=limits.host_blocks,
        piggyback_tokens=backend.piggyback_tokens,
        constraints=constraints,
        batch_invariant=batch_invariant,
        pooling=backend.pooling,
        window=limits.window,
        max_drafts=limits.max_drafts,
    )
    if (costs := backend.host_costs) is not None:
        info.save_block_seconds = costs.save_block
        info.load_block_seconds = costs.load_block
        info.prefill_token_seconds = costs.prefill_token
        info.prefill_pair_seconds = costs.prefill_pair
    return info
