"""A random walk over block pool, prefix cache and batching: no leak, no wrong KV, no starvation.

The walk plays the worker: it stores the state from the deltas of the steps, and checks that a
worker can compute every step.
"""

from collections import deque
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.step_plan import StepOutcome, StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.host_tier import NO_HOST_MEMORY, HostCopies, HostMemory
from pagewire.scheduler.core.kv.prefix_groups import PrefixGroup
from pagewire.scheduler.core.routing import LeastLoaded
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.policies import POLICIES
from pagewire.suspicion import Loss
from support.naive_groups import naive_groups
from support.sequences import GREEDY

BLOCK_SIZE = 4
RUN_AHEAD = 2
EOS = 7
SAMPLED = 5
GARBAGE = ()
# The last one pays off only for long texts.
HOSTS = [
    HostMemory(3, save_block=1, load_block=1, prefill_token=1),
    HostMemory(20, save_block=1, load_block=1, prefill_token=1),
    HostMemory(12, save_block=0.01, load_block=1, prefill_token=0.2, prefill_pair=0.02),
]


class PlayedWorker:
    """A worker's state from the deltas; asserts that each step can be computed.

    Instead of keys and values, each place in a block stores the tokens that they stand for: all
    tokens up to it. A sequence must attend to places with its own tokens, or to garbage of a failed
    sequence; then its results are garbage too.
    """

    def __init__(
        self, window: int = 0, max_drafts: int = 0, accepted: tuple[int, ...] = (0,)
    ) -> None:
        """`window`: positions that a token sees, itself included; 0 for all. `accepted`: accepted
        drafts of decode rows, one row after the other."""
        self.window = window or 10**9
        self.max_drafts = max_drafts
        self.accepted = cycle(accepted)
        # Tokens that each slot may still draw.
        self.left: dict[int, int] = {}
        self.failed: set[int] = set()
        self.groups: list[PrefixGroup] = []
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[int, list[tuple[int, ...]]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.decode: list[int] = []
        self.copies = 0
        self.loaded = 0
        self.freed = 0

    def run(
        self,
        plan: StepPlan,
        starts: list[tuple[int, list[int], int, list[int], int]],
        failing: int,
        left: list[int],
    ) -> "Computed":
        """`failing` chooses one of the step's slots to fail; 0 for none. `left`: the most tokens of
        each start."""
        self.left.update((slot, most) for (slot, *_), most in zip(starts, left, strict=True))
        self._save_and_load(plan.copies)
        self._copy(starts)
        for slot, tokens, computed, blocks, _ in starts:
            self.failed.discard(slot)
            self.blocks[slot] = blocks
            self.tokens[slot] = tokens
            self.known[slot] = len(tokens)
            self.computed[slot] = computed
            assert computed < len(tokens), "nothing is left to compute"
        for slot, count in zip(plan.freed_slots, plan.freed_counts, strict=True):
            assert any(self.blocks[slot][:count]), "nothing new is given up"
            self.blocks[slot][:count] = [0] * count
            self.freed += 1
        for slot, block in zip(plan.append_slots, plan.append_blocks, strict=True):
            self.blocks[slot].append(block)
        if plan.decode_changed:
            self.decode = plan.decode_slots.tolist()
        assert self.decode == plan.decode_slots.tolist(), "the decode list was not sent"
        if plan.groups_changed:
            self.groups = plan.groups
        assert self.groups == plan.groups, "the groups were not sent"
        named = self.decode + plan.prefill_slots
        assert len(set(named)) == len(named), "a slot is named twice in one step"
        errors = set()
        if failing and named and named[failing % len(named)] not in self.failed:
            errors = {named[failing % len(named)]}
            self.failed |= errors
        for group in self.groups:
            for slot in group.slots:
                assert group.blocks * BLOCK_SIZE <= self.computed[slot], "shared but not computed"
        rows, counts = list(self.decode), [1] * len(plan.rows)
        for row, slot in enumerate(self.decode):
            assert self.computed[slot] >= self.known[slot], "decode before the end of prefill"
            counts[row] = self._decode(slot)
        for slot, count in zip(plan.prefill_slots, plan.prefill_counts, strict=True):
            assert count > 0
            self._compute(slot, count)
            assert self.computed[slot] <= self.known[slot], "prefill beyond the known tokens"
            if self.computed[slot] == self.known[slot]:
                rows.append(slot)
                self.left[slot] -= 1
        assert rows == plan.rows.tolist()
        garbage = {
            slot for slot in named if self._attends_to_garbage(slot, self.computed[slot] - 1)
        }
        return Computed(plan, errors, self.failed & set(named), garbage - self.failed, counts)

    def _save_and_load(self, copies: HostCopies | None) -> None:
        if copies is None:
            return
        assert len({*copies.saved_host}) == len(copies.saved_host), "two blocks are saved to one"
        assert len({*copies.loaded}) == len(copies.loaded), "two blocks are loaded to one"
        assert 0 not in copies.saved + copies.loaded, "the scratch block is named"
        for block, host in zip(copies.saved, copies.saved_host, strict=True):
            self.host[host] = [self.places.get((block, i), ()) for i in range(BLOCK_SIZE)]
            assert GARBAGE not in self.host[host], "what is not sound is saved"
        for host, block in zip(copies.loaded_host, copies.loaded, strict=True):
            for offset, tokens in enumerate(self.host[host]):
                self.places[block, offset] = tokens
        self.loaded += len(copies.loaded)

    def _copy(self, starts: list[tuple[int, list[int], int, list[int], int]]) -> None:
        copies = {
            blocks[computed // BLOCK_SIZE]: source
            for _, _, computed, blocks, source in starts
            if source
        }
        assert copies.keys().isdisjoint(copies.values()), "a block is read and written"
        for target, source in copies.items():
            for offset in range(BLOCK_SIZE):
                # The old content of the target is lost, even if the source is empty.
                self.places[target, offset] = self.places.get((source, offset), ())
        self.copies += len(copies)

    def _decode(self, slot: int) -> int:
        """Computes a decode row and its drafts; returns its number of tokens."""
        if not self.max_drafts:
            self._compute(slot, 1)
            return 1
        if self.left[slot] < 1:
            return 1  # the scheduler has not received its end yet
        most = min(1 + self.max_drafts, self.left[slot])
        count = 1 if slot in self.failed else min(1 + next(self.accepted), most)
        self._compute(slot, count)
        self.left[slot] -= count
        for ahead in range(most - count):  # the KV of rejected drafts
            position = self.computed[slot] + ahead
            assert position < len(self.blocks[slot]) * BLOCK_SIZE, "a draft beyond the blocks"
            self.places[self._place(slot, position)] = GARBAGE
        return count

    def _compute(self, slot: int, count: int) -> None:
        for _ in range(count):
            position = self.computed[slot]
            if position == len(self.tokens[slot]):
                # The token sampled last; its value arrives with the answer.
                self.tokens[slot].append(SAMPLED)
            assert position < len(self.blocks[slot]) * BLOCK_SIZE, "KV is written beyond the blocks"
            sound = slot not in self.failed and not self._attends_to_garbage(slot, position)
            written = tuple(self.tokens[slot][: position + 1]) if sound else GARBAGE
            self.places[self._place(slot, position)] = written
            self.computed[slot] += 1

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        block = self.blocks[slot][position // BLOCK_SIZE]
        assert block, "the scratch block was given to a sequence, or a block in use was given up"
        return block, position % BLOCK_SIZE

    def _attends_to_garbage(self, slot: int, query: int) -> bool:
        """Whether the token at position `query` sees garbage."""
        for position in range(max(0, query - self.window + 1), self.computed[slot]):
            stored = self.places[self._place(slot, position)]
            if stored == GARBAGE:
                return True
            assert stored == tuple(self.tokens[slot][: position + 1]), "KV of other tokens"
        return False


@dataclass
class Computed:
    """A step that the worker has run: slots that failed in it, all failed slots that it names, and
    slots whose tokens come from garbage."""

    plan: StepPlan
    errors: set[int]
    failed: set[int]
    garbage: set[int]
    counts: list[int]  # tokens of each row


class Batching(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 14),
        num_slots=st.integers(1, 5),
        budget=st.sampled_from([5, 5, 5, 8, 12, 24]),
        threshold=st.sampled_from([0.5, 0.9, 1.0]),
        policy=st.sampled_from(sorted(POLICIES)),
        groups=st.booleans(),
        piggyback_tokens=st.sampled_from([0, 3, 5]),
        host=st.sampled_from([NO_HOST_MEMORY, *HOSTS]),
        window=st.sampled_from([0, 0, 1, 3, 5, 6, 9, 16]),
        max_drafts=st.integers(0, BLOCK_SIZE - 1),
        accepted=st.lists(st.integers(0, BLOCK_SIZE - 1), min_size=1, max_size=5),
        long_prompt_share=st.sampled_from([0.4, 0.4, 1.0]),
        durations=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    )
    def start(
        self,
        num_blocks: int,
        num_slots: int,
        budget: int,
        threshold: float,
        policy: str,
        groups: bool,
        piggyback_tokens: int,
        host: HostMemory,
        window: int,
        max_drafts: int,
        accepted: list[int],
        long_prompt_share: float,
        durations: list[int],
    ) -> None:
        self.durations = cycle(durations)
        self.admission = Admission(POLICIES[policy](), LeastLoaded())
        self.waiting = self.admission.waiting
        limits = WorkerLimits(
            num_blocks,
            BLOCK_SIZE,
            num_slots,
            budget,
            threshold,
            prefix_groups=groups and not window,
            piggyback_tokens=piggyback_tokens,
            long_prompt_share=long_prompt_share,
            host=NO_HOST_MEMORY if window else host,
            window=window,
            max_drafts=0 if window else max_drafts,
        )
        self.batch = self.admission.add_worker(limits)
        self.worker = PlayedWorker(window, limits.max_drafts, tuple(accepted))
        self.arrivals = 0
        self.requests: list[Sequence] = []
        self.unanswered: deque[Computed] = deque()
        self.failing = 0
        self.now = 0.0

    @rule(
        prompt=st.integers(1, 40),
        family=st.integers(1, 3),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        resumed=st.integers(0, 3),
        salt=st.sampled_from(["", "", "salted"]),
        copies=st.integers(1, 3),
        tenant=st.sampled_from("abc"),
        deadline=st.integers(0, 9),
    )
    def arrive(
        self,
        prompt: int,
        family: int,
        max_tokens: int,
        priority: int,
        resumed: int,
        salt: str,
        copies: int,
        tenant: str,
        deadline: int,
    ) -> None:
        """Requests that may share beginnings, among them `copies` of one prompt at once."""
        for _ in range(copies):
            tokens = np.full(prompt, SAMPLED, dtype=np.int32)
            tokens[prompt // family :: 4] = family  # families share beginnings of several lengths
            sequence = Sequence(
                tokens,
                GREEDY,
                max_tokens,
                (EOS,),
                self.arrivals,
                priority,
                tenant=tenant,
                deadline=deadline,
            )
            sequence.cache_salt = salt
            sequence.output.extend([SAMPLED] * min(resumed, max_tokens - 1))
            self._request(sequence)

    def _request(self, sequence: Sequence) -> None:
        self.arrivals += 1
        if self.batch.fits(sequence):
            self.requests.append(sequence)
            self.waiting.push(sequence)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 1000), more=st.integers(1, 4), output=st.booleans())
    def fork(self, choice: int, more: int, output: bool) -> None:
        """Others arrive with the same prompt, or continue from a request's current tokens."""
        origin = self.requests[choice % len(self.requests)]
        known = [*origin.prompt.tolist(), *(origin.output if output else ())]
        for _ in range(more):
            sequence = Sequence(np.array(known, np.int32), GREEDY, 5, (EOS,), self.arrivals)
            sequence.cache_salt = origin.cache_salt
            self._request(sequence)

    @rule(stop=st.booleans(), keep=st.booleans(), failing=st.sampled_from([0, 0, 1, 2, 3]))
    def step(self, stop: bool, keep: bool, failing: int) -> None:
        """Plans and answers; `failing` chooses a slot that fails in the first step planned."""
        self.failing = failing
        self._fill_pipeline()
        self._answer(EOS if stop else SAMPLED, keep)

    @rule()
    def admit(self) -> None:
        """No step is planned, because enough steps are in flight."""
        self._admit()

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 1000))
    def forget(self, choice: int) -> None:
        self.batch.forget(self.requests[choice % len(self.requests)].arrival)

    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        open_requests = [r for r in self.requests if not r.state.final]
        if not open_requests:
            return
        sequence = open_requests[choice % len(open_requests)]
        if not self.admission.remove(sequence):
            self.batch.finish(sequence.slot, State.CANCELLED)
        sequence.state = State.CANCELLED

    @precondition(lambda self: self.requests)
    @rule()
    def lose_worker(self) -> None:
        loss = Loss("process")
        self.admission.lose_worker(self.batch, loss, self.now)
        loss.resolve("another")
        for deadly in self.admission.remove_deadly():
            deadly.state = State.FAILED
        self.batch = self.admission.add_worker(self.batch.limits, self.now)
        self.worker = PlayedWorker(self.batch.limits.window, self.worker.max_drafts)
        self.unanswered.clear()

    def _admit(self) -> None:
        self.now += 0.3
        assert all(admitted.batch is self.batch for admitted in self.admission.admit(self.now))

    def _fill_pipeline(self) -> None:
        while len(self.unanswered) < RUN_AHEAD:
            self._admit()
            plan = self.batch.plan()
            if plan is None:
                return
            starts = [
                (
                    s.slot,
                    [*s.prompt.tolist(), *s.output],
                    s.num_computed,
                    list(s.blocks),
                    s.copied_block,
                )
                for s in plan.starts
            ]
            tables = {slot: tuple(self.worker.blocks[slot]) for slot in plan.decode_slots.tolist()}
            expected = naive_groups(tables) if self.batch.limits.prefix_groups else []
            assert plan.groups == expected
            left = [s.max_tokens - len(s.output) for s in plan.starts]
            self.unanswered.append(self.worker.run(plan, starts, self.failing, left))
            self.failing = 0

    def _answer(self, token: int, keep: bool = False) -> None:
        if not self.unanswered:
            return
        step = self.unanswered.popleft()
        plan = step.plan
        tokens = np.full(len(plan.rows), SAMPLED, dtype=np.int32)
        counts = np.array(step.counts, dtype=np.int32)
        tokens[:1] = token if step.counts[:1] == [1] else SAMPLED
        tokens[np.isin(plan.rows, list(step.failed))] = -1
        for slot in sorted(step.errors):
            self.batch.slot_failed(slot)
        outcome = self.batch.commit(plan.number, tokens, next(self.durations))
        for slot in sorted(step.errors):
            if self.batch.slots.live[slot]:
                self.waiting.push(self.batch.finish(slot, State.PENDING, sound=False))
        assert not step.garbage & {*outcome.slots.tolist()}, "a token came from garbage"
        self._finish(outcome, keep)
        for place in range(1, counts.max(initial=1)):
            rows = np.flatnonzero(counts > place)
            tokens = np.full(len(rows), SAMPLED, dtype=np.int32)
            if rows[0] == 0 and counts[0] == place + 1:
                tokens[0] = token
            self._finish(self.batch.commit_more(rows, tokens), keep)
        self.batch.settle()

    def _finish(self, outcome: StepOutcome, keep: bool) -> None:
        for slot in outcome.slots[[*{*outcome.stopped, *outcome.ended}]].tolist():
            self.batch.finish(slot, State.COMPLETED, keep=keep)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "batch"):
            self.batch.check()
            for request in self.requests:
                assert len(request.output) <= request.max_tokens

    def teardown(self) -> None:
        """Without further events every request ends, and every block is released."""
        if not hasattr(self, "batch"):
            return
        for _ in range(200 * (len(self.requests) + 1)):
            if all(r.state.final for r in self.requests):
                break
            self._fill_pipeline()
            assert self.unanswered, "requests are open and no step can be planned"
            self._answer(SAMPLED)
        assert all(r.state.final for r in self.requests), "a request starved"
        while self.unanswered:
            self._answer(SAMPLED)
        for request in self.requests:
            self.batch.forget(request.arrival)
        assert self.batch.pool.used == 0
        assert self.batch.idle
        for request in self.requests:
            if request.state is State.COMPLETED and EOS not in request.output:
                assert len(request.output) == request.max_tokens


Batching.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestBatching = Batching.TestCase
