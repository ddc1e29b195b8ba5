"""How a step runs on a device: eagerly or from CUDA graphs, with its inputs, copies and slot state.

The model's math belongs to `model`, single operations to `ops`, work before serving to `startup`.
"""
