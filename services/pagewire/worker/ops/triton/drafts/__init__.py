"""Kernels of decode steps whose rows may be drafts: `begin` and `end` run before and after layers.

How many rows a step has belongs to `protocol.speculation`. Attention and sampling of drafted rows
have the kernels of other rows.
"""
