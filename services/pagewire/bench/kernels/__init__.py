"""The kernel benchmark: each operation alone, timed on a GPU beside plain torch.

The shapes, the inputs, the cases and their measurement. Printing results belongs to the command
line.
"""
