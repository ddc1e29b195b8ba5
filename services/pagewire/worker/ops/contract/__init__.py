"""What the runtime and every implementation of the operations agree on.

A Protocol documents each operation: its arguments, shapes, dtypes and result. Beside them lie the
dataclasses of tensors that operations take, and the constants that both sides must know. No
operation is implemented here.
"""
