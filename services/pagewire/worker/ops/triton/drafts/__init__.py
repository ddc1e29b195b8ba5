"""Kernels of decode steps whose rows may be drafts: `begin` and `end` run before and after layers.

`protocol.speculation` chooses how many rows a step has. Attention and sampling use the same kernels
for drafted rows as for other rows.
"""
