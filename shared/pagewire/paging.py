"""Sizes of the paged KV cache that scheduler and worker must agree on."""


def blocks_before(window: int, block_size: int) -> int:
    """Maximum blocks, before the block of a token, with positions in the token's window.

    `window` counts positions, the token's own included. The bound holds for any token of a block.
    """
    return -(-(window - 1) // block_size)
