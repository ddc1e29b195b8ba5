"""From a configuration to a worker that can serve: loading, tuning, compiling kernels."""
