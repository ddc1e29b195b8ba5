"""A worker without a model, for tests of the scheduler over gRPC.

It checks that every step follows the protocol. A token is a function of prompt and index, so a
sequence that runs again must get the same tokens.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import numpy as np

from pagewire.packing import pack, pack_floats, unpack
from pagewire.rpc.checksums import ChecksumInterceptor
from pagewire.rpc.protocol import HEARTBEAT_SECONDS, PROTOCOL_VERSION
from pagewire.rpc.transport import SERVER_OPTIONS
from pagewire.v1 import worker_pb2 as pb
from pagewire.v1 import worker_pb2_grpc
from pagewire.worker.protocol.steps.step import StepPrefixGroup, decode_step


def token_at(prompt: list[int], index: int, vocab_size: int) -> int:
    """The token at an index of an output."""
    return (sum(prompt) * 31 + len(prompt) * 7 + index * 13) % vocab_size


def logprobs_at(
    prompt: list[int], index: int, top: int, vocab_size: int
) -> tuple[float, list[int], list[float]]:
    """The token's log probability, and ids and log probabilities of the likeliest tokens."""
    base = -((sum(prompt) + index) % 64) / 64
    first = token_at(prompt, index, vocab_size) + 1
    ids = [(first + rank) % vocab_size for rank in range(top)]
    return base - 5, ids, [base - rank / 4 for rank in range(top)]


def prompt_logprob_at(
    prompt: list[int], position: int, top: int, vocab_size: int
) -> tuple[float, int, list[int], list[float]]:
    """Log probability and rank of a prompt token, and ids and values of the likeliest tokens."""
    ids = [(prompt[position] + 1 + rank) % vocab_size for rank in range(top)]
    values = [-position / 64 - rank / 4 for rank in range(top)]
    return -position / 64 - 5, position + 7, ids, values


def vector_at(prompt: list[int], size: int) -> list[float]:
    """The vector of a prompt, from a worker that pools."""
    return [(sum(prompt) + len(prompt) * number) % 64 / 64 + 0.5 for number in range(size)]


@dataclass
class Slot:
    """The state of one slot."""

    prompt: list[int]
    known: int
    computed: int
    generated: int
    blocks: list[int]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    first_scored: int = 0


@dataclass
class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Serves until `stop`; its fields control its faults."""

    info: pb.WorkerInfo
    step_seconds: float = 0.0
    token_seconds: float = 0.0  # added for each prompt token in a step
    # Prompt tokens of each step that had decodes.
    chunks: list[int] = field(default_factory=list)
    # By first token of a prompt: how often its slot still fails.
    failing: dict[int, int] = field(default_factory=dict)
    retryable: bool = True
    # Ends the stream after this many steps, once.
    break_after: int | None = None
    # Stops answering after this many steps, once.
    hang_after: int | None = None
    # Breaks the stream whenever it computes a prompt with this first token.
    poison: int | None = None
    # Sends heartbeats, by default with all steps as read.
    says_alive: bool = True
    reads: int | None = None
    # Answers with this result after this many steps, once.
    bad_result: tuple[int, pb.StepResult] | None = None
    broken: int = 0
    steps: int = 0
    # Sent log probabilities of prompt tokens, and sequences that had some before.
    scored: int = 0
    scored_before: int = 0
    # The size of the largest prefix group so far.
    most_grouped: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _server: grpc.aio.Server | None = None

    async def start(self, address: str) -> None:
        """Listens on an address."""
        self._server = grpc.aio.server(interceptors=[ChecksumInterceptor()], options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)
        await self._server.start()

    async def stop(self) -> None:
        """Breaks every connection."""
        if self._server is not None:
            await self._server.stop(None)

    async def Run(  # noqa: N802
        self, requests: AsyncIterator[pb.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunResponse]:
        """The step stream."""
        answers: asyncio.Queue[pb.RunResponse | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._answer_steps(requests, context, answers)),
            asyncio.create_task(self._say_alive(answers)),
        ]
        try:
            while (answer := await answers.get()) is not None:
                yield answer
            await tasks[0]
        finally:
            for task in tasks:
                task.cancel()

    async def _say_alive(self, answers: "asyncio.Queue[pb.RunResponse | None]") -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if not self.says_alive:
                continue
            alive = pb.Alive(received_steps=2**64 - 1 if self.reads is None else self.reads)
            answers.put_nowait(pb.RunResponse(alive=alive))

    async def _answer_steps(
        self,
        requests: AsyncIterator[pb.RunRequest],
        context: grpc.aio.ServicerContext,
        answers: "asyncio.Queue[pb.RunResponse | None]",
    ) -> None:
        try:
            async for answer in self._answers(requests, context):
                answers.put_nowait(answer)
        finally:
            answers.put_nowait(None)

    async def _answers(
        self, requests: AsyncIterator[pb.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RunResponse]:
        hello = await anext(aiter(requests))
        assert hello.hello.protocol_version == PROTOCOL_VERSION
        self.slots.clear()
        decode: list[int] = []
        groups: tuple[StepPrefixGroup, ...] = ()
        number = 0
        yield pb.RunResponse(ready=self.info)
        async for message in requests:
            step = message.step
            number += 1
            self.steps += 1
            self._expect(step.step == number, f"step {step.step} after {number - 1}")
            if step.HasField("decode_slots"):
                decode = unpack(step.decode_slots).tolist()
            result = self._compute(step, decode)
            found = decode_step(step).groups
            groups = groups if found is None else found
            self._check_groups(groups, decode)
            if self.break_after is not None and self.steps >= self.break_after:
                self.break_after = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
            if self.poison is not None and self._computes_poison(step, decode):
                self.broken += 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted end")
            if self.hang_after is not None and self.steps >= self.hang_after:
                self.hang_after = None
                await asyncio.Event().wait()
            prefilled = int(unpack(step.prefill_counts).sum())
            if decode:
                self.chunks.append(prefilled)
            if self.bad_result is not None and self.steps >= self.bad_result[0]:
                result = self.bad_result[1]
                self.bad_result = None
            seconds = self.step_seconds + prefilled * self.token_seconds
            result.duration_us = int(seconds * 1e6)
            if seconds:
                await asyncio.sleep(seconds)
            yield pb.RunResponse(result=result)

    def _compute(self, step: pb.Step, decode: list[int]) -> pb.StepResult:
        for start in step.starts:
            tokens = unpack(start.token_ids).tolist()
            prompt = tokens[: len(tokens) - start.num_generated]
            self.slots[start.slot] = Slot(
                prompt,
                len(tokens),
                start.num_computed,
                start.num_generated,
                unpack(start.blocks).tolist(),
                start.sampling.logprobs if start.sampling.HasField("logprobs") else None,
                start.prompt_logprobs if start.HasField("prompt_logprobs") else None,
                start.first_prompt_logprob,
            )
            self.scored_before += start.first_prompt_logprob > 1
        appended = zip(unpack(step.append_slots), unpack(step.append_blocks), strict=True)
        for slot, block in appended:
            self.slots[int(slot)].blocks.append(int(block))
        rows = list(decode)
        for slot in decode:
            self._advance(slot, 1)
        counts = unpack(step.prefill_counts).tolist()
        chunks = [
            (slot, self.slots[slot].computed, count)
            for slot, count in zip(unpack(step.prefill_slots).tolist(), counts, strict=True)
        ]
        for slot, count in zip(unpack(step.prefill_slots).tolist(), counts, strict=True):
            self._advance(slot, count)
            state = self.slots[slot]
            self._expect(state.computed <= state.known, "prefill beyond the known tokens")
            if state.computed == state.known:
                rows.append(slot)
        self._check_blocks()
        errors = [error for slot in rows if (error := self._scripted_error(slot))]
        failed = {error.slot for error in errors}
        if self.info.HasField("pooling"):
            return self._pooled(step, rows, errors)
        tokens = [-1 if slot in failed else self._sample(slot) for slot in rows]
        return pb.StepResult(
            step=step.step,
            token_ids=pack(tokens),
            errors=errors,
            prompt_logprobs=self._prompt_logprobs(chunks),
            **self._logprobs(rows, tokens),
        )

    def _pooled(self, step: pb.Step, rows: list[int], errors: list[pb.SlotError]) -> pb.StepResult:
        pooling, failed = self.info.pooling, {error.slot for error in errors}
        self._expect(not step.decode_slots, "a decode row at a worker that pools")
        if pooling.whole_prompt:
            given = {start.num_computed for start in step.starts}
            self._expect(given <= {0}, "cached tokens of a prompt that is pooled as a whole")
        sound = [self.slots[slot].prompt for slot in rows if slot not in failed]
        numbers = [number for prompt in sound for number in vector_at(prompt, pooling.size)]
        return pb.StepResult(
            step=step.step,
            token_ids=pack([-1 if slot in failed else 0 for slot in rows]),
            errors=errors,
            pooled=pack_floats(np.array(numbers, np.float32)),
        )

    def _computes_poison(self, step: pb.Step, decode: list[int]) -> bool:
        named = [*decode, *unpack(step.prefill_slots).tolist()]
        return any(self.slots[slot].prompt[0] == self.poison for slot in named)

    def _advance(self, slot: int, count: int) -> None:
        state = self.slots[slot]
        state.computed += count
        room = len(state.blocks) * self.info.block_size
        self._expect(state.computed <= room, f"slot {slot} computes beyond its blocks")

    def _check_blocks(self) -> None:
        for state in self.slots.values():
            self._expect(0 not in state.blocks, "the scratch block is in use")
            self._expect(max(state.blocks) < self.info.num_blocks, "a block outside the pool")

    def _check_groups(self, groups: tuple[StepPrefixGroup, ...], decode: list[int]) -> None:
        self._expect(
            self.info.prefix_groups or not groups, "groups for a worker without prefix groups"
        )
        self.most_grouped = max([self.most_grouped, *(len(group.slots) for group in groups)])
        for group in groups:
            slots = group.slots.tolist()
            self._expect({*slots} <= {*decode}, "a group of slots that do not decode")
            heads = {tuple(self.slots[slot].blocks[: group.blocks]) for slot in slots}
            self._expect(len(heads) == 1, "a group that does not share its blocks")

    def _sample(self, slot: int) -> int:
        state = self.slots[slot]
        token = token_at(state.prompt, state.generated, self.info.vocab_size)
        state.generated += 1
        return token

    def _logprobs(self, slots: list[int], tokens: list[int]) -> dict[str, bytes]:
        """Fields of the result: log probabilities of the rows that ask for them.

        Each row has as many top values as the largest request.
        """
        states = [self.slots[slot] for slot in slots]
        wanting = [i for i, s in enumerate(states) if s.logprobs is not None and tokens[i] >= 0]
        top = max((states[i].logprobs for i in wanting), default=0)
        found = [
            logprobs_at(states[i].prompt, states[i].generated - 1, top, self.info.vocab_size)
            for i in wanting
        ]
        return {
            "logprob_rows": pack(wanting),
            "logprobs": pack_floats(np.array([own for own, _, _ in found], np.float32)),
            "top_ids": pack([token for _, ids, _ in found for token in ids]),
            "top_logprobs": pack_floats(np.array([values for _, _, values in found], np.float32)),
        }

    def _prompt_logprobs(self, chunks: list[tuple[int, int, int]]) -> pb.PromptLogprobs | None:
        """Log probabilities of chunks, each a slot, its first token and its size."""
        slots, begins, counts, found = [], [], [], []
        for slot, begin, count in chunks:
            state = self.slots[slot]
            if state.prompt_logprobs is None:
                continue
            self._expect(state.first_scored > 0, "log probabilities of the first token")
            first = max(begin + 1, state.first_scored)
            last = min(begin + count + 1, len(state.prompt))
            if first < last:
                slots.append(slot)
                begins.append(first)
                counts.append(last - first)
                found += [(state, position) for position in range(first, last)]
        if not slots:
            return None
        top = max(state.prompt_logprobs or 0 for state, _ in found)
        self.scored += len(found)
        scored = [prompt_logprob_at(s.prompt, at, top, self.info.vocab_size) for s, at in found]
        return pb.PromptLogprobs(
            slots=pack(slots),
            begins=pack(begins),
            counts=pack(counts),
            logprobs=pack_floats(np.array([own for own, *_ in scored], np.float32)),
            ranks=pack([rank for _, rank, *_ in scored]),
            top_ids=pack([token for _, _, ids, _ in scored for token in ids]),
            top_logprobs=pack_floats(np.array([values for *_, values in scored], np.float32)),
        )

    def _scripted_error(self, slot: int) -> pb.SlotError | None:
        key = self.slots[slot].prompt[0]
        if self.failing.get(key, 0) <= 0:
            return None
        self.failing[key] -= 1
        return pb.SlotError(slot=slot, message="scripted failure", retryable=self.retryable)

    def _expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)
