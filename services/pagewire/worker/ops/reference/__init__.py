"""The worker's operations in plain torch: the CPU backend, and the oracle of every kernel test."""
