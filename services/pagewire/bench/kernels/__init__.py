"""The kernel benchmark: each operation alone, timed on a GPU beside plain torch.

The shapes, the inputs, the cases and their measurement. The command line prints the results.
"""
