"""Runs steps on a device, eagerly or from CUDA graphs, with their inputs, copies and slot state.

The model's math belongs to `model`, single operations to `ops`, work before serving to `startup`.
"""
