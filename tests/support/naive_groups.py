"""A slow and simple reference for prefix groups."""

from itertools import combinations

from pagewire.scheduler.core.kv.prefix_groups import MIN_BLOCKS, MIN_MEMBERS, PrefixGroup

Table = tuple[int, ...]


def naive_groups(tables: dict[int, Table]) -> list[PrefixGroup]:
    """Tries every common prefix of two block tables, shorter ones first."""
    heads = set()
    for one, other in combinations(tables.values(), 2):
        common = 0
        while one[common : common + 1] == other[common : common + 1] != ():
            common += 1
        heads.add(one[:common])
    groups: dict[Table, PrefixGroup] = {}
    for head in sorted(heads, key=len):
        slots = tuple(sorted(s for s, table in tables.items() if table[: len(head)] == head))
        around = max((len(outer) for outer in groups if head[: len(outer)] == outer), default=0)
        if len(slots) >= MIN_MEMBERS and len(head) - around >= MIN_BLOCKS:
            groups[head] = PrefixGroup(len(head), slots)
    return sorted(groups.values(), key=lambda group: (group.slots[0], group.blocks))
