"""Host memory, the second tier of the prefix cache: saves, loads and their costs."""

import numpy as np
import pytest

from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.cached_prefix import Restart
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.block_pool import BlockPool
from pagewire.scheduler.core.kv.host_tier import HostMemory, Reuse
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.routing import Candidate, PrefixAware
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.workers.step_codec import encode_step
from support.sequences import GREEDY

SIZE = 4
# A block needs 1 s to save, 1 s to load, 4 s to compute.
MEMORY = HostMemory(8, save_block=1, load_block=1, prefill_token=1)


def tokens(*blocks: int) -> bytes:
    """A text whose blocks are full of these tokens."""
    return np.repeat(np.array(blocks, np.int32), SIZE).tobytes()


def cached(pool: BlockPool, *text: int, proven: bool = True) -> list[int]:
    """Caches a text without holders."""
    blocks = pool.allocate(len(text))
    pool.cache(blocks, tokens(*text), proven=proven)
    pool.release(blocks)
    return blocks


def on_host(pool: BlockPool, *text: int) -> list[int]:
    """The host's blocks, from 0 on, that hold the end of a text."""
    found = pool.match(tokens(*text))
    return [block - pool.host.first for block in found[pool.num_on_device(found) :]]


def test_evicted_blocks_are_saved_and_found_again() -> None:
    pool = BlockPool(5, SIZE, MEMORY)
    text = cached(pool, 1, 2, 3)
    taken = pool.allocate(3)
    assert pool.match(tokens(1, 2, 3))[:1] == text[:1], "the end is evicted first"
    copies = pool.take_copies()
    assert copies is not None
    assert (copies.saved, copies.saved_host) == (text[1:], on_host(pool, 1, 2, 3))
    assert not copies.loaded
    assert pool.take_copies() is None
    pool.check()
    pool.release(taken)


def test_loaded_blocks_leave_host_memory_once_the_step_is_planned() -> None:
    pool = BlockPool(5, SIZE, MEMORY)
    cached(pool, 1, 2)
    pool.release(pool.allocate(4))
    pool.take_copies()
    found = pool.match(tokens(1, 2))
    assert pool.num_on_device(found) == 0
    blocks = pool.bring([], found, more=1)
    assert pool.match(tokens(1, 2)) == blocks[:2], "the next sequence shares them"
    assert pool.host.used == 2, "a step that saves before it loads must not write there"
    pool.check()
    copies = pool.take_copies()
    assert copies is not None
    assert copies.loaded == blocks[:2]
    assert copies.loaded_host == [block - pool.host.first for block in found]
    assert pool.host.used == 0
    pool.release(blocks)
    pool.check()


def test_a_block_is_not_saved_from_before_it_was_loaded() -> None:
    """Its sequence leaves before the step is planned, and others need all the memory."""
    pool = BlockPool(5, SIZE, MEMORY)
    cached(pool, 1, 2)
    pool.release(pool.allocate(4))
    pool.take_copies()
    blocks = pool.bring([], pool.match(tokens(1, 2)), more=0)
    pool.release(blocks)
    assert pool.available == 2
    others = pool.allocate(2)
    assert not {*others} & {*blocks}
    pool.take_copies()
    assert pool.available == 2
    pool.allocate(2)
    copies = pool.take_copies()
    assert copies is not None
    assert sorted(copies.saved) == sorted(blocks)
    pool.check()


def test_a_block_saved_and_wanted_in_the_same_plan() -> None:
    """Saves precede loads, so the block passes through the host in one step."""
    pool = BlockPool(5, SIZE, MEMORY)
    (block,) = cached(pool, 1)
    taken = pool.allocate(4)
    assert pool.match(tokens(1)) == [pool.host.first]
    pool.release(taken[:1])
    (back,) = pool.bring([], pool.match(tokens(1)), more=0)
    copies = pool.take_copies()
    assert copies is not None
    assert (copies.saved, copies.saved_host) == ([block], [0])
    assert (copies.loaded_host, copies.loaded) == ([0], [back])
    pool.check()


def test_host_memory_drops_the_least_recently_used_blocks() -> None:
    pool = BlockPool(5, SIZE, HostMemory(3, 1, 1, 1))
    for text in ((1, 2), (3, 4)):
        cached(pool, *text)
    pool.allocate(4)
    assert len(on_host(pool, 3, 4)) == 2
    assert len(on_host(pool, 1, 2)) == 1, "the beginning is useful without the end"
    copies = pool.take_copies()
    assert copies is not None
    assert len(copies.saved) == 3, "dropped blocks are not copied"
    pool.check()


def test_unproven_blocks_are_never_saved() -> None:
    pool = BlockPool(5, SIZE, MEMORY)
    blocks = pool.allocate(3)
    pool.cache(blocks[:1], tokens(1))
    pool.cache(blocks, tokens(1, 2, 3), proven=False)
    pool.release(blocks)
    pool.allocate(4)
    copies = pool.take_copies()
    assert copies is not None
    assert copies.saved == blocks[:1]
    assert len(on_host(pool, 1, 2, 3)) == 1
    pool.check()


def test_a_failed_prefill_drops_the_blocks_below_it_in_host_memory() -> None:
    pool = BlockPool(5, SIZE, MEMORY)
    cached(pool, 1, 2)
    pool.allocate(4)
    assert len(on_host(pool, 1, 2)) == 2
    pool.take_copies()
    held = [3, 4]
    pool.release([1, 2])
    mine = pool.allocate(1)
    pool.cache(mine, tokens(1), proven=False)  # computed, although it could have been loaded
    assert pool.match(tokens(1, 2))[0] == mine[0]
    assert pool.host.used == 1
    assert pool.drop_unproven(mine) == {*mine}
    assert pool.match(tokens(1, 2)) == []
    assert pool.host.used == 0
    pool.release(mine + held)
    pool.check()


def test_loads_and_saves_depend_on_their_costs() -> None:
    memory = HostMemory(8, save_block=2, load_block=3, prefill_token=0.5, prefill_pair=0.1)
    assert memory.prefill(0, 4) == pytest.approx(4 * 0.5 + 6 * 0.1)
    assert memory.prefill(4, 8) == pytest.approx(memory.prefill(0, 8) - memory.prefill(0, 4))
    assert not memory.load_pays(1, 0, 4)
    assert memory.load_pays(1, 4, 8), "attention to what comes before costs as well"
    assert not memory.save_pays(1, 4, 1.0)
    assert not memory.save_pays(6, 24, 0.5)
    assert memory.save_pays(6, 24, 1.0)


def candidate(batch: WorkerBatch, sequence: Sequence) -> Candidate:
    return Candidate(batch, batch.find_cached(sequence))


def test_blocks_that_take_longer_to_load_than_to_compute_are_not_loaded() -> None:
    slow = HostMemory(8, save_block=0.01, load_block=3, prefill_token=1, prefill_pair=0)
    worker, other = (
        WorkerBatch(
            WorkerLimits(9, SIZE, 4, 64, 1.0, host=memory), FirstComeFirstServed(), lambda _: None
        )
        for memory in (MEMORY, slow)
    )
    for batch in (worker, other):
        cached(batch.pool, 1, 2)
        batch.pool.release(batch.pool.allocate(8))
    prompt = Sequence(np.repeat(np.array([1, 2, 5], np.int32), SIZE), GREEDY, 5, (), 0)
    cheap, dear = candidate(worker, prompt), candidate(other, prompt)
    assert cheap.cached.num_tokens == dear.cached.num_tokens == 8
    assert worker.prefill_cost(prompt, cheap.cached) == 4 + 2 * 1
    assert other.prefill_cost(prompt, dear.cached) == 4 + 2 * 3
    assert PrefixAware().choose(prompt, [dear, cheap]) is cheap
    slower = HostMemory(8, save_block=0.01, load_block=5, prefill_token=1)
    other.limits = WorkerLimits(9, SIZE, 4, 64, 1.0, host=slower)
    batch = WorkerBatch(other.limits, FirstComeFirstServed(), lambda _: None)
    cached(batch.pool, 1, 2)
    batch.pool.release(batch.pool.allocate(8))
    none = batch.find_cached(prompt)
    assert none.num_tokens == 0
    assert batch.prefill_cost(prompt, none) == 12


def test_saving_stops_when_no_saved_block_is_found_again() -> None:
    """Every text is new: after a while one in sixteen is saved, to detect a change."""
    pool = BlockPool(9, SIZE, HostMemory(64, save_block=1, load_block=1, prefill_token=1))
    saved = []
    for text in range(1500):
        cached(pool, 2 * text, 2 * text + 1)
        copies = pool.take_copies()
        saved.append(0 if copies is None else len(copies.saved))
    pool.check()
    assert sum(saved[:100]) > 150
    assert 0 < sum(saved[-500:]) < 2 * 500 / 8
    # The same few texts repeat, too many for the device: saving pays off again.
    hits = 0
    for text in range(3000):
        again = tokens(10**6 + text % 16)
        found = pool.match(again)
        here = pool.num_on_device(found)
        pool.acquire(found[:here])
        blocks = found[:here] + pool.bring(found[:here], found[here:], 1 - len(found))
        pool.cache(blocks, again)
        pool.take_copies()
        pool.release(blocks)
        hits += text >= 2500 and len(found) > 0
    assert hits > 450


def test_reuse_follows_recent_blocks() -> None:
    reuse = Reuse(window=1000)
    assert reuse.share == 1.0
    for _ in range(100):
        reuse.count(dropped=50)
    assert reuse.share < 0.05
    for _ in range(100):
        reuse.count(found=50)
    assert reuse.share > 0.95


class Driven:
    """One worker and its queue; answers every step with the token 5."""

    def __init__(self, num_blocks: int, host: HostMemory) -> None:
        self.admission = Admission(FirstComeFirstServed(), PrefixAware())
        limits = WorkerLimits(num_blocks, SIZE, 4, 64, 1.0, host=host)
        self.batch = self.admission.add_worker(limits)
        self.returns: list[Restart] = []
        self.saved = self.loaded = 0

    def ask(self, arrival: int, prompt: int, wanted: int) -> Sequence:
        sequence = Sequence(np.full(prompt, arrival + 9, np.int32), GREEDY, wanted, (), arrival)
        self.admission.waiting.push(sequence)
        return sequence

    def step(self) -> None:
        returned = [admitted.restart for admitted in self.admission.admit()]
        self.returns += [way for way in returned if way is not None]
        plan = self.batch.plan()
        assert plan is not None
        if plan.copies is not None:
            self.saved += len(plan.copies.saved)
            self.loaded += len(plan.copies.loaded)
            message = encode_step(plan)
            assert len(message.saved_blocks) == len(message.saved_host_blocks)
        outcome = self.batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
        for slot in outcome.slots[outcome.ended].tolist():
            self.batch.finish(slot, State.COMPLETED)
        self.batch.check()


@pytest.mark.parametrize(("memory", "way"), [(MEMORY, Restart.SWAPPED), (None, Restart.RECOMPUTED)])
def test_a_preempted_sequence_is_swapped_or_computed_again(
    memory: HostMemory | None, way: Restart
) -> None:
    """The first needs the whole pool before it ends, including all blocks of the second."""
    driven = Driven(11, memory or HostMemory())
    first, second = driven.ask(0, 16, 24), driven.ask(1, 16, 24)
    for _ in range(100):
        if second.state is State.COMPLETED:
            break
        driven.step()
    assert [first.state, second.state] == [State.COMPLETED] * 2
    assert driven.admission.preemptions == 1
    assert driven.returns == [way]
    assert (driven.loaded > 0) == (memory is not None)
    assert driven.saved >= driven.loaded
    assert driven.batch.pool.used == 0


def test_blocks_of_a_preempted_sequence_are_saved_however_few_are_reused() -> None:
    pool = BlockPool(9, SIZE, HostMemory(64, save_block=1, load_block=1, prefill_token=1))
    pool.host.reuse.count(dropped=10**6)
    cached(pool, 10, 11)  # so that the next text is not a saved sample
    blocks = pool.allocate(2)
    pool.cache(blocks, tokens(1, 2))
    pool.expect(blocks)
    pool.release(blocks)
    pool.allocate(8)
    copies = pool.take_copies()
    assert copies is not None
    assert sorted(copies.saved) == sorted(blocks)
    pool.check()
