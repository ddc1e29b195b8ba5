"""Integer arithmetic on the host.

Triton's functions of these names take about 3 us a call, because they also run in its compiler. A
worker calls them a dozen times for each layer of each graph that it captures.
"""


def cdiv(value: int, by: int) -> int:
    """Return `value / by`, rounded up; `by` is positive."""
    return -(-value // by)


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`; `value` is positive."""
    return 1 << (value - 1).bit_length()
