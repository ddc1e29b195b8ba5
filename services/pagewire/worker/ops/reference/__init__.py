"""The operations in plain torch: they run on a CPU, and every kernel is tested against them.

Each function implements the operation of the same name in `ops.contract`.
"""
