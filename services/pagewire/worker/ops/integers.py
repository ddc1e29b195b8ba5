"""Integers on the host. Triton's functions of these names are made for its compiler: some 3 us a
call, of which a worker makes a dozen for each layer of each graph that it captures."""


def cdiv(value: int, by: int) -> int:
    """`value / by`, rounded up; `by` is positive."""
    return -(-value // by)


def next_power_of_2(value: int) -> int:
    """The least power of two that is not below `value`, which is positive."""
    return 1 << (value - 1).bit_length()
