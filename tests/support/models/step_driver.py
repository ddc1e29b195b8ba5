"""Drives a worker through the step protocol: blocks, prefill chunks, steps ahead of results."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from pagewire.config import WorkerConfig
from pagewire.errors import RequestError
from pagewire.packing import pack, unpack, unpack_floats
from pagewire.tokenizer_conversion import has_tokenizer
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.backend import LoadedWorker
from pagewire.worker.protocol.constraints.mask_processes import MaskProcesses
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.metrics import WorkerMetrics
from pagewire.worker.protocol.queue_thread import QueueThread
from pagewire.worker.protocol.session import Session
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.startup.loading import load_worker


class Stream(Protocol):
    """A step stream: results arrive in the order of the steps."""

    async def send(self, step: pb.Step) -> None: ...

    async def receive(self) -> pb.StepResult: ...


@dataclass
class LocalStream:
    """A stream to an executor in this process."""

    engine: StepExecutor
    session: Session

    async def send(self, step: pb.Step) -> None:
        self.engine.step(self.session, step)

    async def receive(self) -> pb.StepResult:
        answer = await self.session.answers.get()
        if isinstance(answer, RequestError):
            raise answer
        assert answer is not None
        return answer


@dataclass
class LocalWorker:
    """A loaded worker in this process, without gRPC."""

    loaded: LoadedWorker
    engine: StepExecutor
    fatal: list[BaseException] = field(default_factory=list)
    masks: MaskProcesses | None = None

    @property
    def limits(self) -> Limits:
        return self.loaded.limits

    def stream(self) -> LocalStream:
        return LocalStream(
            self.engine, Session(1, self.limits, self.masks, row_costs=self.engine.row_costs)
        )


@asynccontextmanager
async def local_worker(
    folder: Path,
    adapt: Callable[[LoadedWorker], LoadedWorker] = lambda loaded: loaded,
    **settings: Any,
) -> AsyncIterator[LocalWorker]:
    """A worker, on the CPU by default; `adapt` may replace parts of it before it serves."""
    defaults = {"num_blocks": 128, "num_slots": 16, "torch_threads": 1, "device": "cpu"}
    config = WorkerConfig(model=str(folder), **(defaults | settings))
    fatal: list[BaseException] = []
    launcher = QueueThread("launcher", fatal.append)
    loaded = adapt(await launcher.call(lambda: load_worker(config)))
    if loaded.uses_triton:
        await launcher.call(loaded.backend.warm_up)
    engine = StepExecutor(
        loaded.backend, launcher, WorkerMetrics(CollectorRegistry()), fatal.append
    )
    masks = None
    # Without a tokenizer the processes would only end: most tiny models have none.
    structured = config.structured_output and has_tokenizer(folder)
    if loaded.backend.mask_memory is not None and structured:
        masks = MaskProcesses(loaded.backend.mask_memory, 1, fatal.append)
        masks.launch(config, folder, None, loaded.limits.vocab_size)
        masks = masks if masks.ready() else None
    yield LocalWorker(loaded, engine, fatal, masks)
    await asyncio.to_thread(engine.close)
    if masks is not None:
        masks.close()


# The token's log probability, then ids and log probabilities of the likeliest tokens.
Logprobs = tuple[float, list[int], list[float]]


@dataclass
class Sequence:
    """A sequence: its tokens, and the numbers of tokens generated and still to generate."""

    tokens: list[int]
    wanted: int
    generated: int = 0
    sampling: pb.SlotSampling = field(default_factory=lambda: pb.SlotSampling(top_p=1.0))
    constraint: pb.Constraint | None = None
    prediction: list[int] = field(default_factory=list)
    salt: str = ""
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    # Number of likeliest tokens for each prompt token, and the first position to score.
    prompt_top: int | None = None
    first_scored: int = 1
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    vector: list[float] = field(default_factory=list)
    failure: str = ""
    slot: int = -1
    computed: int = 0
    sampled: int = 0
    blocks: list[int] = field(default_factory=list)
    freed: int = 0


class StepDriver:
    """Runs sequences in one batch on a stream, and collects their tokens."""

    def __init__(self, stream: Stream, limits: Limits | pb.WorkerInfo) -> None:
        self.stream = stream
        self.block_size = limits.block_size
        self.max_tokens = limits.max_num_batched_tokens
        self.window = limits.window
        # Adjacent blocks of a sequence are not adjacent in memory.
        self.free = deque(range(limits.num_blocks - 1, 0, -2))
        self.free.extend(range(limits.num_blocks - 2, 0, -2))
        self.slots = deque(range(limits.num_slots))
        self.number = 0
        # The most tokens of a decode row; above 1 the worker speculates.
        self.reach = 1 + limits.max_drafts
        # Drafts and accepted drafts, by drafter in worker.proto.
        self.drafts: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()

    async def run(
        self,
        sequences: list[Sequence],
        *,
        chunk: int = 1 << 20,
        run_ahead: int = 1,
        free: bool = False,
    ) -> list[list[int]]:
        """Returns the outputs. A step computes at most `chunk` tokens of each prompt, up to the
        step's limit. `run_ahead` steps are sent before the first result is read. With `free`,
        blocks behind the worker's window are reused at once."""
        assert not free or (self.window and run_ahead == 1)
        waiting: deque[list[Sequence]] = deque()
        decoding: list[Sequence] = []
        step = pb.Step(starts=[self._start(sequence) for sequence in sequences])
        while True:
            prefilling = [s for s in sequences if s.computed < len(s.tokens)]
            decoded = [s for s in sequences if s not in prefilling and s.sampled < s.wanted]
            if not prefilling and not decoded:
                break
            if decoded != decoding:
                step.decode_slots = pack([s.slot for s in decoded])
                decoding = decoded
            rows = list(decoded)
            if free:
                self._give_up(step, sequences)
            for sequence in decoded:
                self._grow(step, sequence, self.reach)
            slots, counts = [], []
            for sequence in prefilling:
                left = self.max_tokens - len(decoded) - sum(counts)
                count = min(chunk, len(sequence.tokens) - sequence.computed, left)
                if not count:
                    break
                self._grow(step, sequence, count)
                slots.append(sequence.slot)
                counts.append(count)
                if sequence.computed == len(sequence.tokens):
                    rows.append(sequence)
            step.prefill_slots, step.prefill_counts = pack(slots), pack(counts)
            for sequence in rows:
                sequence.sampled += 1
            await self._send(step)
            waiting.append(rows)
            if len(waiting) >= run_ahead:
                await self._receive(waiting.popleft(), sequences)
            step = pb.Step()
        while waiting:
            await self._receive(waiting.popleft(), sequences)
        for sequence in sequences:
            self.free.extend(sequence.blocks[sequence.freed :])
            self.slots.append(sequence.slot)
        await self._send(pb.Step(decode_slots=b""))
        await self._receive([], [])
        return [sequence.output for sequence in sequences]

    def _start(self, sequence: Sequence) -> pb.SequenceStart:
        sequence.slot = self.slots.popleft()
        return pb.SequenceStart(
            slot=sequence.slot,
            token_ids=pack(sequence.tokens),
            num_generated=sequence.generated,
            num_computed=0,
            sampling=sequence.sampling,
            constraint=sequence.constraint,
            max_new_tokens=sequence.wanted if self.reach > 1 else 0,
            prompt_logprobs=sequence.prompt_top,
            first_prompt_logprob=sequence.first_scored,
            prediction=pack(sequence.prediction),
            cache_salt=sequence.salt,
        )

    def _give_up(self, step: pb.Step, sequences: list[Sequence]) -> None:
        """Frees, in a step, the blocks behind the windows of all next tokens."""
        for sequence in sequences:
            end = max(0, sequence.computed - self.window + 1) // self.block_size
            if end > sequence.freed:
                step.freed_slots += pack([sequence.slot])
                step.freed_counts += pack([end])
                # The next allocations reuse these blocks.
                self.free.extendleft(sequence.blocks[sequence.freed : end])
                sequence.blocks[sequence.freed : end] = [0] * (end - sequence.freed)
                sequence.freed = end

    def _grow(self, step: pb.Step, sequence: Sequence, count: int) -> None:
        """Adds `count` computed tokens to a sequence, and the blocks that they need to the step."""
        sequence.computed += count
        needed = sequence.computed
        if self.reach > 1:
            needed = min(needed, len(sequence.tokens) + sequence.wanted - 1)
        appended = []
        while len(sequence.blocks) * self.block_size < needed:
            appended.append(self.free.popleft())
            sequence.blocks.append(appended[-1])
        step.append_slots += pack([sequence.slot] * len(appended))
        step.append_blocks += pack(appended)

    async def _send(self, step: pb.Step) -> None:
        self.number += 1
        step.step = self.number
        await self.stream.send(step)

    async def _receive(self, rows: list[Sequence], sequences: list[Sequence]) -> None:
        result = await self.stream.receive()
        tokens = unpack(result.token_ids).tolist()
        if self.reach > 1:
            rows = self._runs(result, rows)
        assert len(tokens) == len(rows)
        for sequence, token in zip(rows, tokens, strict=True):
            if self.reach == 1 or len(sequence.output) < sequence.wanted:
                sequence.output.append(token)
        if result.pooled:
            self._take_vectors(result, rows)
        else:
            self._take_logprobs(result, rows)
        by_slot = {sequence.slot: sequence for sequence in sequences}
        self._take_prompt_logprobs(result.prompt_logprobs, by_slot)
        for error in result.errors:
            assert not by_slot[error.slot].failure, "a failure is reported once"
            by_slot[error.slot].failure = error.message

    def _runs(self, result: pb.StepResult, rows: list[Sequence]) -> list[Sequence]:
        """Returns the sequence of each token; updates the counts of drafts and sequences."""
        counts = unpack(result.token_counts).tolist() or [1] * len(rows)
        reports = (result.draft_rows, result.draft_counts, result.drafters)
        for row, drafted, drafter in zip(*(unpack(each).tolist() for each in reports), strict=True):
            if not rows[row].failure:
                self.drafts[drafter] += drafted
                self.accepted[drafter] += counts[row] - 1
                assert counts[row] - 1 <= drafted < self.reach
        for sequence, count in zip(rows, counts, strict=True):
            assert 1 <= count <= self.reach
            sequence.sampled += count - 1
            if sequence.output:  # else the row is of its prompt
                sequence.computed -= self.reach - count
        return [s for s, count in zip(rows, counts, strict=True) for _ in range(count)]

    def _take_vectors(self, result: pb.StepResult, rows: list[Sequence]) -> None:
        sound = [sequence for sequence in rows if sequence.output[-1] >= 0]
        vectors = unpack_floats(result.pooled).reshape(len(sound), -1)
        for sequence, vector in zip(sound, vectors.tolist(), strict=True):
            assert sequence.output == [0]
            sequence.vector = vector

    def _take_prompt_logprobs(
        self, message: pb.PromptLogprobs, by_slot: dict[int, Sequence]
    ) -> None:
        counts, at = unpack(message.counts).tolist(), 0
        if not counts:
            return
        own, ranks = unpack_floats(message.logprobs).tolist(), unpack(message.ranks).tolist()
        ids, top = unpack(message.top_ids), unpack_floats(message.top_logprobs)
        ids, top = ids.reshape(sum(counts), -1), top.reshape(sum(counts), -1)
        named = zip(unpack(message.slots), unpack(message.begins), counts, strict=True)
        for slot, begin, count in named:
            sequence = by_slot[int(slot)]
            assert begin == sequence.first_scored + len(sequence.ranks), "in order, each once"
            rows = slice(at, at + count)
            at += count
            sequence.ranks += ranks[rows]
            sequence.prompt_logprobs += zip(
                own[rows], ids[rows].tolist(), top[rows].tolist(), strict=True
            )

    def _take_logprobs(self, result: pb.StepResult, rows: list[Sequence]) -> None:
        named = unpack(result.logprob_rows)
        chosen = unpack_floats(result.logprobs).tolist()
        ids = unpack(result.top_ids).reshape(len(named), -1).tolist() if len(named) else []
        top = unpack_floats(result.top_logprobs).reshape(len(named), -1) if len(named) else []
        for row, own, its_ids, its_top in zip(named, chosen, ids, top, strict=True):
            wanted = rows[row].sampling.logprobs  # all rows have the same number
            rows[row].logprobs.append((own, its_ids[:wanted], its_top[:wanted].tolist()))
        wanting = [i for i, s in enumerate(rows) if s.sampling.HasField("logprobs")]
        if self.reach > 1:
            return
        assert [i for i in wanting if rows[i].output[-1] >= 0] == named.tolist()
