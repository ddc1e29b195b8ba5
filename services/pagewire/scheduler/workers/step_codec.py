"""Planned steps as the messages that are sent to a worker."""

import numpy as np

from pagewire.packing import pack
from pagewire.sampling import numbers_of
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.sequence import Sequence
from pagewire.v1 import worker_pb2 as pb


def encode_step(plan: StepPlan, drafts: bool = False) -> pb.Step:
    """The message of a step; call it before anything else changes the sequences.

    `drafts`: the worker speculates, so it gets salts and predictions.
    """
    step = pb.Step(step=plan.number)
    if plan.starts:
        step.starts.extend(_encode_start(sequence) for sequence in plan.starts)
        if drafts:
            for start, sequence in zip(step.starts, plan.starts, strict=True):
                start.cache_salt = sequence.cache_salt
                if sequence.prediction is not None:
                    start.prediction = pack(sequence.prediction)
    if plan.append_slots:
        step.append_slots = pack(plan.append_slots)
        step.append_blocks = pack(plan.append_blocks)
    if plan.freed_slots:
        step.freed_slots = pack(plan.freed_slots)
        step.freed_counts = pack(plan.freed_counts)
    if plan.prefill_slots:
        step.prefill_slots = pack(plan.prefill_slots)
        step.prefill_counts = pack(plan.prefill_counts)
    if plan.decode_changed:
        step.decode_slots = pack(plan.decode_slots)
    if plan.copies is not None:
        step.saved_blocks = pack(plan.copies.saved)
        step.saved_host_blocks = pack(plan.copies.saved_host)
        step.loaded_host_blocks = pack(plan.copies.loaded_host)
        step.loaded_blocks = pack(plan.copies.loaded)
    if plan.groups_changed:
        step.group_sizes = pack([len(group.slots) for group in plan.groups])
        step.group_blocks = pack([group.blocks for group in plan.groups])
        step.group_slots = pack([slot for group in plan.groups for slot in group.slots])
    return step


def _encode_start(sequence: Sequence) -> pb.SequenceStart:
    sampling = sequence.sampling
    # The worker needs stop tokens only to keep them from being drawn before min_tokens.
    stop_ids: tuple[int, ...] = sequence.stop_ids if sampling.min_tokens else ()
    scored = sequence.prompt_logprobs
    if scored is not None and scored.complete:
        scored = None
    start = pb.SequenceStart(
        slot=sequence.slot,
        token_ids=pack(np.concatenate([sequence.prompt, np.array(sequence.output, np.int32)])),
        num_generated=sequence.num_generated,
        num_computed=sequence.num_computed,
        blocks=pack(sequence.blocks),
        copied_block=sequence.copied_block,
        max_new_tokens=sequence.max_tokens - sequence.num_generated,
        end_token_ids=sequence.stop_ids,
        prompt_logprobs=None if scored is None else scored.num_top,
        first_prompt_logprob=None if scored is None else scored.next,
        traceparent=sequence.traceparent,
        sampling=pb.SlotSampling(
            **numbers_of(sampling),
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            stop_token_ids=stop_ids,
            logprobs=sampling.logprobs,
            bias_ids=sampling.bias_ids,
            biases=sampling.biases,
        ),
    )
    if sampling.constraint:
        start.constraint.ParseFromString(sampling.constraint)
    return start
