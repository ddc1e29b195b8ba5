"""KV blocks of one worker: the pool, the radix tree over cached blocks, host memory."""
