"""What a worker measures on its device before it serves: copies, prefill, rows of a step.

It drives a `Backend` and needs no torch.
"""
