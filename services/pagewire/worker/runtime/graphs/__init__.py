"""Steps as CUDA graphs: decode steps, mixed steps, and sampling that waits for masks."""
