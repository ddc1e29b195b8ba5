"""Measurements on the worker's device before it serves: copies, prefill, rows of a step.

They drive a `Backend`; only `row_costs` needs torch.
"""
