"""The answers of sequences that run alone, among others, in chunks, or from cached blocks."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from pagewire.packing import pack, unpack, unpack_floats
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.steps.limits import Limits
from support.models.step_driver import Logprobs, Sequence, StepDriver, Stream

VOCABULARY = 2048
# Sizes of a model that has several tiles and shares of everything, but starts in seconds.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "initializer_range": 0.05,
}


@dataclass(frozen=True)
class Wanted:
    """A request to a worker for `count` tokens with log probabilities."""

    prompt: list[int]
    count: int
    sampling: pb.SlotSampling = field(
        default_factory=lambda: pb.SlotSampling(top_p=1.0, logprobs=1)
    )
    prediction: list[int] = field(default_factory=list)
    salt: str = ""

    def sequence(self) -> Sequence:
        return Sequence(
            list(self.prompt),
            self.count,
            sampling=self.sampling,
            prediction=self.prediction,
            salt=self.salt,
        )


@dataclass(frozen=True)
class Answer:
    """Tokens and log probabilities; answers are equal if all their bits are."""

    tokens: list[int]
    logprobs: list[Logprobs]


async def answers(
    driver: StepDriver,
    wanted: Sequences[Wanted],
    *,
    others: Sequences[Wanted] = (),
    at_once: int = 1 << 20,
    chunk: int = 1 << 20,
    run_ahead: int = 2,
) -> list[Answer]:
    """Returns the answers; `at_once` sequences run at a time, beside all `others`."""
    found = []
    for begin in range(0, len(wanted), at_once):
        ours = [request.sequence() for request in wanted[begin : begin + at_once]]
        theirs = [request.sequence() for request in others]
        await driver.run([*theirs, *ours], chunk=chunk, run_ahead=run_ahead)
        found += [Answer(sequence.output, sequence.logprobs) for sequence in ours]
    return found


async def preempted_answers(
    driver: StepDriver, wanted: Sequences[Wanted], after: int
) -> list[Answer]:
    """The answers of sequences that lose their blocks after some tokens and are recomputed.

    A sequence that moves to another worker is computed in the same way.
    """
    first = [request.sequence() for request in wanted]
    for sequence in first:
        sequence.wanted = after
    await driver.run(first)
    again = [
        Sequence(
            [*request.prompt, *begun.output],
            request.count - after,
            generated=after,
            sampling=request.sampling,
            prediction=request.prediction,
            salt=request.salt,
        )
        for request, begun in zip(wanted, first, strict=True)
    ]
    await driver.run(again)
    return [
        Answer(begun.output + rest.output, begun.logprobs + rest.logprobs)
        for begun, rest in zip(first, again, strict=True)
    ]


async def answers_from_cache(
    stream: Stream, limits: Limits, wanted: Sequences[Wanted], shared: int, *, grouped: bool
) -> list[Answer]:
    """The answers of sequences that share the KV of their first `shared` tokens.

    The first sequence computes its prompt. The others begin with its blocks, and compute the rest.
    With `grouped`, decode steps name the prefix as shared. All sequences have the same `count`.
    """
    size = limits.block_size
    assert shared % size == 0
    count, number = wanted[0].count, 0
    free = iter(range(1, limits.num_blocks))
    tables: list[list[int]] = []
    for request in wanted:
        blocks = -(-(len(request.prompt) + count) // size)
        common = tables[0][: shared // size] if tables else []
        tables.append(common + [next(free) for _ in range(blocks - len(common))])
    found = [Answer([], []) for _ in wanted]

    async def run(step: pb.Step, slots: list[int]) -> None:
        nonlocal number
        number += 1
        step.step = number
        await stream.send(step)
        result = await stream.receive()
        assert not result.errors
        for slot, token in zip(slots, unpack(result.token_ids).tolist(), strict=True):
            found[slot].tokens.append(token)
        rows = unpack(result.logprob_rows).tolist()
        if not rows:
            return
        ids = unpack(result.top_ids).reshape(len(rows), -1).tolist()
        top = unpack_floats(result.top_logprobs).reshape(len(rows), -1).tolist()
        chosen = unpack_floats(result.logprobs).tolist()
        for row, own, its_ids, its_top in zip(rows, chosen, ids, top, strict=True):
            most = wanted[slots[row]].sampling.logprobs  # all rows have the same number
            found[slots[row]].logprobs.append((own, its_ids[:most], its_top[:most]))

    def start(slot: int, computed: int) -> pb.SequenceStart:
        return pb.SequenceStart(
            slot=slot,
            token_ids=pack(wanted[slot].prompt),
            num_computed=computed,
            blocks=pack(tables[slot]),
            sampling=wanted[slot].sampling,
        )

    step = pb.Step(starts=[start(0, 0)])
    left = len(wanted[0].prompt)
    while left:
        chunk = min(left, limits.max_num_batched_tokens)
        left -= chunk
        step.prefill_slots, step.prefill_counts = pack([0]), pack([chunk])
        await run(step, [] if left else [0])
        step = pb.Step()
    others = list(range(1, len(wanted)))
    step = pb.Step(starts=[start(slot, shared) for slot in others], decode_slots=pack([0]))
    step.prefill_slots = pack(others)
    step.prefill_counts = pack([len(wanted[slot].prompt) - shared for slot in others])
    await run(step, [0, *others])
    for index in range(count - 1):
        # The first sequence began a step earlier and ends first.
        slots = [0, *others] if index < count - 2 else others
        step = pb.Step()
        if index in (0, count - 2):
            step.decode_slots = pack(slots)
            if grouped:
                step.group_sizes = pack([len(slots)])
                step.group_blocks = pack([shared // size])
                step.group_slots = pack(slots)
        await run(step, slots)
    await run(pb.Step(decode_slots=b""), [])
    return found
