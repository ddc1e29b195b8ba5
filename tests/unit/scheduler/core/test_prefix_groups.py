"""Groups of slots that share their first blocks: single cases, and a naive computation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import RequestError
from pagewire.packing import pack
from pagewire.scheduler.core.kv.prefix_groups import MIN_BLOCKS, PrefixGroup, PrefixGroups
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.protocol.steps.step import decode_step
from support.naive_groups import Table, naive_groups


def test_nested_groups_come_outer_first() -> None:
    groups = PrefixGroups()
    groups.add(5, [1, 2, 3, 4, 5, 6, 7, 8, 50])
    groups.add(2, [1, 2, 3, 4, 20])
    assert groups.refresh()
    assert groups.groups == [PrefixGroup(4, (2, 5))]
    groups.add(9, [1, 2, 3, 4, 5, 6, 7, 8, 90])
    groups.add(7, [70, 71, 72, 73, 74])
    assert groups.refresh()
    assert groups.groups == [PrefixGroup(4, (2, 5, 9)), PrefixGroup(8, (5, 9))]


def test_slots_that_share_no_blocks_change_no_group() -> None:
    groups = PrefixGroups()
    for slot in range(4):
        groups.add(slot, range(10 * slot + 1, 10 * slot + 9))
    assert not groups.refresh()
    groups.discard(2)
    groups.discard(2)
    assert not groups.refresh()
    assert groups.groups == []


def test_a_short_run_makes_no_group() -> None:
    groups = PrefixGroups()
    head = list(range(1, MIN_BLOCKS))
    groups.add(0, [*head, 50])
    groups.add(1, [*head, 60])
    assert not groups.refresh()
    groups.add(2, [*head, 60, 61])
    groups.refresh()
    assert groups.groups == [PrefixGroup(MIN_BLOCKS, (1, 2))]


def grown(choices: list[int]) -> Table:
    """A table in which the same blocks always precede a block."""
    table: list[int] = []
    node = 0
    for choice in choices:
        node = 3 * node + 1 + choice
        table += [2 * node, 2 * node + 1]
    return tuple(table)


EVENTS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(0, 1), max_size=6)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_groups_equal_a_naive_computation(events: list[tuple[int, list[int]]]) -> None:
    """Slots are added and removed; after each change the groups are those of the current tables."""
    groups, tables = PrefixGroups(), dict[int, Table]()
    for slot, choices in events:
        before = groups.groups
        if slot in tables:
            del tables[slot]
            groups.discard(slot)
        else:
            tables[slot] = grown(choices)
            groups.add(slot, tables[slot])
        changed = groups.refresh()
        assert groups.groups == naive_groups(tables)
        assert changed == (groups.groups != before)


def groups_of(sizes: list[int], blocks: list[int], slots: list[int]) -> pb.Step:
    return pb.Step(
        step=1, group_sizes=pack(sizes), group_blocks=pack(blocks), group_slots=pack(slots)
    )


def test_groups_arrive_as_they_were_sent() -> None:
    assert decode_step(pb.Step(step=1)).groups is None
    assert decode_step(groups_of([], [], [])).groups == ()
    found = decode_step(groups_of([3, 2], [4, 8], [1, 5, 9, 5, 9])).groups
    assert found is not None
    assert [(g.blocks, g.slots.tolist()) for g in found] == [(4, [1, 5, 9]), (8, [5, 9])]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (groups_of([2], [4, 5], [0, 1]), "group_blocks has 2 values and group_sizes 1"),
        (groups_of([1], [4], [0]), "1 members"),
        (groups_of([-2, 4], [4, 4], [0, 1]), "-2 members"),
        (groups_of([2], [0], [0, 1]), "shares 0 blocks"),
        (groups_of([2], [4], [0, 1, 2]), "has 3 slots; group_sizes add up to 2"),
        (groups_of([2], [4], [1, 1]), "must ascend"),
        (pb.Step(step=1, group_slots=pack([1, 2])), "has 2 slots; group_sizes add up to 0"),
        (pb.Step(step=1, group_sizes=b"abc"), "multiple of 4"),
    ],
)
def test_malformed_groups_are_refused(message: pb.Step, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        decode_step(message)
