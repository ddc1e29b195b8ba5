"""The interface between the runtime and the implementations of the operations.

A Protocol documents each operation: its arguments, shapes, dtypes and result. The dataclasses that
operations accept, and the constants that both sides use, are also here. No operation is
implemented here.
"""
