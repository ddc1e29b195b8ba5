"""The operations in plain torch: they run on a CPU, and every kernel is tested against them.

A function implements the operation of its name, which `ops.contract` documents.
"""
