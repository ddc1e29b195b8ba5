"""How a step runs on a device: eagerly or from CUDA graphs, with its inputs, copies and state."""
