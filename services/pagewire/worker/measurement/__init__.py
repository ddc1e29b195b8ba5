"""What a worker measures on its device before it serves: copies, prefill, piggybacked prefill.

It drives a `Backend` and needs no torch.
"""
