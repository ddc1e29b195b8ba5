"""Sizes of the paged KV cache that scheduler and worker must agree on."""


def blocks_before(window: int, block_size: int) -> int:
    """Blocks before that of a token which hold positions that it sees through a window.

    `window` counts positions, that of the token included. The bound holds for any token of a block.
    """
    return -(-(window - 1) // block_size)
