"""EAGLE-3 heads: one layer that drafts tokens from the hidden states of its target.

The choice of drafts in a step, and the head's KV, belong to `runtime`.
"""
